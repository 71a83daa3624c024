"""What a build knows of its buckets: results of a fresh process that verifies them, and FlashInfer's own errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from podgraph.catalog import store
from podgraph.catalog.model import Catalog
from podgraph.errors import ConfigError, VerificationError
from podgraph.journal import Result
from podgraph.providers import flashinfer

BUILD_SEED = 20_000
# the verifying process can import no FlashInfer; it finds no compiler either, its PATH is empty
CHILD = "import sys; sys.modules['flashinfer'] = None; from podgraph import verify; sys.exit(verify.main(sys.argv[1:]))"

Progress = Callable[[str, int, int], None]


def verify_in_child(candidate: Catalog, out: Path, progress: Progress) -> Iterator[Result]:
    """Writes the candidate beside its destination and has a fresh process verify it, bucket by bucket.

    Raises:
        VerificationError: the process did not come to its end.
    """
    if not candidate.records:
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"{out}: its folder cannot be made: {e.strerror}; name another file with --output") from e
    with tempfile.TemporaryDirectory(prefix=".podgraph-", dir=out.parent) as scratch:
        path = Path(scratch) / "candidate.podcat"
        store.write(path, candidate)
        environment = os.environ | {"PATH": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", CHILD, str(path), str(BUILD_SEED)]
        done = 0
        with (
            (Path(scratch) / "stderr").open("w+") as stderr,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment) as child,
        ):
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    result = json.loads(line)
                    if "error" in result and "spec" not in result:
                        raise VerificationError(f"verification could not start: {result['error']}")
                    done += 1
                    progress("verify", done, len(candidate.records))
                    yield result
                child.wait()
            finally:
                child.kill()  # where the builder stopped listening; a process that has ended is left alone
            stderr.seek(0)
            last = stderr.read().strip().splitlines()[-1:] or ["no message"]
    if child.returncode != 0 or done != len(candidate.records):
        raise VerificationError(
            f"the verifying process ended with {child.returncode} after {done} of {len(candidate.records)} buckets, "
            f"nothing was written: {last[0]}"
        )


def compare_flashinfer(candidate: Catalog, results: list[Result], device: int, progress: Progress) -> None:
    """Adds FlashInfer's own error on the same batches, and a problem where ours is more than twice that."""
    import torch

    from podgraph import samples, verify

    where = torch.device("cuda", device)
    eager = {name: flashinfer.EagerReference(entry.attention, where) for name, entry in candidate.specs.items()}
    for done, (record, result) in enumerate(zip(candidate.records, results, strict=True), 1):
        spec = candidate.specs[record.spec].attention
        kv_len = min(verify.KV_LEN["cuda"], candidate.max_kv_len)
        worst = 0.0
        limits = kv_len, candidate.max_pages, BUILD_SEED, candidate.max_kv_len
        for batch in samples.sample_batches(record.bucket, spec, *limits).values():
            inputs = samples.make_inputs(batch, spec, where, BUILD_SEED)
            want, _ = samples.reference(batch, spec, inputs)
            got = eager[record.spec].run(batch, inputs.q, inputs.k, inputs.v)
            worst = max(worst, samples.relative_error(got, want))
        result["flashinfer_error"] = worst
        if result["error"] > 2 * worst and not result["problem"]:
            result["problem"] = f"relative error {result['error']:.2e}, FlashInfer's own is {worst:.2e}"
        progress("compare", done, len(results))
