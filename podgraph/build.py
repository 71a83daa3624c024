"""One build, strictly downward: config -> kernels -> captures -> candidate file -> verification -> catalog."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import podgraph
from podgraph import choice, driver
from podgraph.capture.kit import Kit
from podgraph.catalog import store
from podgraph.catalog.model import Catalog, Fingerprint, Record, Region, SpecEntry, Template
from podgraph.config import BuildSpec
from podgraph.errors import CompileError, ConfigError, CudaError, VerificationError
from podgraph.journal import Journal, Result, code_digest
from podgraph.planner import Layout, Policy, kernels_of
from podgraph.planner.args import PLAN, RUN
from podgraph.planner.policy import Kernels
from podgraph.providers import flashinfer, nvcc, planner, pod_sm90
from podgraph.shapes import AttentionSpec

ARCHITECTURES = {"8.0": "sm_80", "9.0": "sm_90a"}
CUDA_TOOLKIT = 13000  # least driver version that loads cubins of the CUDA 13.0 toolkit
BUILD_SEED = 20_000
# the verifying process can import no FlashInfer; it finds no compiler either, its PATH is empty
CHILD = "import sys; sys.modules['flashinfer'] = None; from podgraph import verify; sys.exit(verify.main(sys.argv[1:]))"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class BuildResult:
    """What a build made.

    Attributes:
        path: the catalog.
        backend: ``cuda`` or ``cpu``; ``reason`` says why, where the config said ``auto``.
        catalog: its content.
        catalog_bytes: size of the file.
        reused: buckets that an earlier build had verified with the same kernels, parameters and limits.
        note: why nothing of an existing catalog was reused, where that is so.
        failures: buckets left out, with what was wrong (only with ``keep_going``).
        seconds: time spent by stage.
    """

    path: Path
    backend: str
    reason: str
    catalog: Catalog
    catalog_bytes: int
    reused: int
    note: str
    failures: tuple[str, ...]
    seconds: dict[str, float]


def build(
    spec: BuildSpec,
    out: Path,
    *,
    kernels: Path,
    backend: str | None = None,
    device: int = 0,
    keep_going: bool = False,
    fresh: bool = False,
    compare_flashinfer: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> BuildResult:
    """Builds a catalog. Nothing is written unless every bucket verifies.

    Args:
        out: the file to write.
        kernels: folder of compiled kernels; what is missing there is compiled into it.
        backend: instead of the config's.
        keep_going: write the buckets that verify even where others fail.
        fresh: verify every bucket, also those that an earlier build has verified.
        compare_flashinfer: also hold every bucket's error against twice that of FlashInfer's own eager result.
        progress: called with (stage, done, total).

    Raises:
        PodgraphError: with what to do next.
    """
    seconds: dict[str, float] = {}
    chosen, reason = choose_backend(backend or spec.backend, device)
    if chosen == "cuda":
        try:
            candidate = _cuda_candidate(spec, kernels, device, progress, seconds)
        except CompileError as e:
            if (backend or spec.backend) != "auto":
                raise
            chosen, reason = "cpu", str(e)
    if chosen == "cpu":
        candidate = _cpu_candidate(spec)
    journal = Journal(out, candidate, fresh)
    candidate = choice.without_losers(candidate, journal)
    with _timed(seconds, "verify"):
        results, reused = _verify_missing(candidate, journal, out, progress)
    if compare_flashinfer:
        with _timed(seconds, "compare"):
            _compare_flashinfer(candidate, results, device, progress)
    catalog, failures = choice.with_evidence(candidate, results)
    if failures and not keep_going:
        raise VerificationError(f"{len(failures)} of {len(results)} buckets failed, nothing was written; {failures[0]}")
    if not catalog.records:
        raise VerificationError(f"every bucket failed, nothing was written; {failures[0]}")
    size = store.write(out, catalog)
    journal.discard()
    return BuildResult(out, chosen, reason, catalog, size, reused, journal.note, tuple(failures), seconds)


def choose_backend(wanted: str, device: int = 0) -> tuple[str, str]:
    """(``cuda`` or ``cpu``, why): ``auto`` is cuda where a GPU of a known kind answers."""
    if wanted == "cpu":
        return "cpu", "asked for"
    try:
        found = driver.open_device(device)
    except CudaError as e:
        if wanted == "cuda":
            raise
        return "cpu", f"no GPU: {e}"
    import torch

    message = ""
    if not torch.cuda.is_available():
        message = f"{found.name}: torch {torch.__version__} cannot use it (a build without CUDA, or an older driver)"
    elif found.compute_capability not in ARCHITECTURES:
        message = f"{found.name}: compute capability {found.compute_capability}, allowed: {', '.join(ARCHITECTURES)}"
    if message and wanted == "cuda":
        raise CudaError(message)
    return ("cpu", message) if message else ("cuda", found.name)


def compile_kernels(
    spec: BuildSpec, arch: str, folder: Path, progress: Progress = lambda stage, done, total: None
) -> dict[nvcc.Source, nvcc.Compiled]:
    """Compiles every kernel that the config can reach; needs nvcc and no GPU.

    Raises:
        ConfigError: an architecture that podgraph does not know.
        CompileError: no compiler, no headers, or the compiler's own error.
    """
    if arch not in ARCHITECTURES.values():
        raise ConfigError(f"arch: got {arch!r}, allowed: {', '.join(ARCHITECTURES.values())}")
    sources: list[nvcc.Source] = [planner.check_source()]
    for attention in spec.specs.values():
        sources.append(planner.plan_source(_kernels(attention, arch)))
        if _kernels(attention, arch) == "sm90":
            sources += [pod_sm90.source(attention, setting) for setting in pod_sm90.settings_of(attention)]
            continue
        sources += [flashinfer.pod_source(attention, v, arch) for v in flashinfer.reachable(attention, spec.buckets)]
        sources.append(flashinfer.merge_source(attention))
    sources = list(dict.fromkeys(sources))
    done = iter(range(1, len(sources) + 1))
    return nvcc.compile_all(sources, arch, folder, lambda: progress("compile", next(done), len(sources)))


def _kernels(attention: AttentionSpec, arch: str) -> Kernels:
    """Whose kernels serve a specification."""
    return "flashinfer" if pod_sm90.refusal(attention, arch) else "sm90"


def _cpu_candidate(spec: BuildSpec) -> Catalog:
    records = [Record(name, bucket, "interpreter", -1) for name in spec.specs for bucket in spec.buckets]
    return _catalog(spec, Fingerprint("cpu"), (), {}, records, {})


def _cuda_candidate(
    spec: BuildSpec, kernels: Path, device: int, progress: Progress, seconds: dict[str, float]
) -> Catalog:
    found = driver.open_device(device)
    arch = ARCHITECTURES[found.compute_capability]
    largest = max(bucket.batch for bucket in spec.buckets)
    if largest > planner.MAX_BATCH:
        raise ConfigError(
            f"{spec.source}: buckets: batch: got {largest}, allowed: at most {planner.MAX_BATCH} on a GPU: one thread "
            "block plans a step"
        )
    with _timed(seconds, "compile"):
        compiled = compile_kernels(spec, arch, kernels, progress)
    images: dict[str, bytes] = {}
    templates: dict[Template, int] = {}
    planners: dict[str, int] = {}
    records = []
    with _timed(seconds, "capture"), contextlib.ExitStack() as stack:
        total = len(spec.specs) * len(spec.buckets)
        for done, (name, attention) in enumerate(spec.specs.items()):
            policy = Policy.for_sms(found.sm_count, _kernels(attention, arch), spec.partition)
            layout = Layout.of(attention, spec.buckets, policy)
            kit = Kit(attention, layout, policy, found.sm_count, arch, compiled, images, stack)
            template = kit.planner(spec.workspace.max_pages, spec.workspace.max_kv_len)
            planners[name] = templates.setdefault(template, len(templates))
            for number, bucket in enumerate(spec.buckets, 1):
                # every bucket is captured and proven by itself; equal ones then share one template
                for variant, template in kit.captures(bucket):
                    index = templates.setdefault(template, len(templates))
                    records.append(Record(name, bucket, variant, index))
                progress("capture", done * len(spec.buckets) + number, total)
    fingerprint = Fingerprint("cuda", found.compute_capability, found.sm_count, CUDA_TOOLKIT)
    return _catalog(spec, fingerprint, tuple(templates), planners, records, images)


def _catalog(
    spec: BuildSpec,
    fingerprint: Fingerprint,
    templates: tuple[Template, ...],
    planners: dict[str, int],
    records: list[Record],
    images: dict[str, bytes],
) -> Catalog:
    entries = {}
    for name, attention in spec.specs.items():
        family = kernels_of(next(r.variant for r in records if r.spec == name))
        layout = Layout.of(attention, spec.buckets, Policy.for_sms(fingerprint.sm_count, family, spec.partition))
        sizes = dict.fromkeys((*RUN.pointers, *PLAN.pointers), 0) | layout.sizes
        regions = tuple(Region(region, size) for region, size in sorted(sizes.items()))
        entries[name] = SpecEntry(attention, regions, layout.capacity, planners.get(name, -1))
    needed = sum(region.size for entry in entries.values() for region in entry.regions)
    if spec.workspace.max_bytes is not None and needed > spec.workspace.max_bytes:
        raise ConfigError(
            f"{spec.source}: workspace.max_bytes: got {spec.workspace.max_bytes}, allowed: at least {needed}, the "
            "regions of all specs; fewer prefill slots need less"
        )
    built_with = {"podgraph": podgraph.__version__, "source": code_digest()}
    if any(kernels_of(r.variant) == "flashinfer" for r in records) and templates:
        built_with["flashinfer-python"] = flashinfer.VERSION
    return Catalog(
        fingerprint=fingerprint,
        specs=entries,
        max_pages=spec.workspace.max_pages,
        max_kv_len=spec.workspace.max_kv_len,
        templates=templates,
        records=tuple(records),
        images=images,
        built_with=built_with,
        partition=spec.partition,
    )


def _verify_missing(candidate: Catalog, journal: Journal, out: Path, progress: Progress) -> tuple[list[Result], int]:
    """A result for every record, and how many were known before."""
    known = {i: result for i, record in enumerate(candidate.records) if (result := journal.known(record)) is not None}
    missing = [i for i in range(len(candidate.records)) if i not in known]
    todo = dataclasses.replace(candidate, records=tuple(candidate.records[i] for i in missing))
    results = dict(known)
    for i, result in zip(missing, _verify_in_child(todo, out, progress), strict=True):
        results[i] = result
        journal.add(candidate.records[i], result)
    return [results[i] for i in range(len(candidate.records))], len(known)


def _verify_in_child(candidate: Catalog, out: Path, progress: Progress) -> Iterator[Result]:
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


def _compare_flashinfer(candidate: Catalog, results: list[Result], device: int, progress: Progress) -> None:
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


@contextlib.contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start
