"""One build, strictly downward: config -> kernels -> captures -> candidate file -> verification -> catalog."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import podgraph
from podgraph import choice, driver, evidence
from podgraph.capture.kit import Kit
from podgraph.catalog import expected, store
from podgraph.catalog.model import Catalog, Fingerprint, Record, Region, SpecEntry, Template
from podgraph.config import BuildSpec
from podgraph.errors import CompileError, ConfigError, CudaError, VerificationError
from podgraph.evidence import Progress
from podgraph.journal import Journal, Result, code_digest
from podgraph.planner import Layout, Policy, kernels_of, packed
from podgraph.planner.args import PLAN, RUN
from podgraph.planner.policy import Kernels
from podgraph.providers import flashinfer, nvcc, planner, pod_sm90
from podgraph.providers.nvcc import ARCHITECTURES
from podgraph.shapes import AttentionSpec

CUDA_TOOLKIT = 13000  # least driver version that loads cubins of the CUDA 13.0 toolkit


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
            evidence.compare_flashinfer(candidate, results, device, progress)
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
            for field, got, allowed in packed.limits(attention, layout.capacity, policy.kernels):
                raise ConfigError(
                    f"{spec.source}: specs.{name}: {field} of its work lists: got {got}, allowed: {allowed}; make the "
                    "largest bucket smaller"
                )
            kit = Kit(expected.Setup(attention, layout, policy, found.sm_count, arch), compiled, images, stack)
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
    for i, result in zip(missing, evidence.verify_in_child(todo, out, progress), strict=True):
        results[i] = result
        journal.add(candidate.records[i], result)
    return [results[i] for i in range(len(candidate.records))], len(known)


@contextlib.contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start
