"""What a catalog holds, as plain frozen data: no torch, no driver, no file.

Catalog -> specs (regions), templates (nodes, edges, relocations, slots), records (bucket -> template), images
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from podgraph.planner.policy import Capacity, Partition, Policy, kernels_of
from podgraph.shapes import AttentionSpec, Bucket

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Region:
    """A named piece of device memory that graphs refer to.

    Attributes:
        name: ``q``, ``k``, ``v``, ``out``, ``lse``, ``qo_indptr``, ``kv_indptr``, ``kv_last_page_len``,
            ``kv_indices`` (the caller's), ``kv_maps`` (made for a cache), ``status`` (the planner's report), or
            ``meta``, ``plan``, ``partials``, ``counters`` (the runtime's own).
        size: bytes that the runtime allocates; 0 where the caller brings the memory.
    """

    name: str
    size: int


@dataclass(frozen=True)
class KernelNode:
    """One kernel launch of a graph.

    Attributes:
        image: sha256 of the image that holds the function, lower-case hex.
        function: its unmangled entry name.
        grid, block: launch dimensions.
        shared_bytes: dynamic shared memory of the launch; also set as the function's limit at load.
        params: the bytes of the kernel's only parameter, relocated words zero.
    """

    image: str
    function: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    params: bytes


@dataclass(frozen=True)
class Relocation:
    """The 8-byte word at ``offset`` of ``node``'s parameters is the address of ``region`` plus ``addend``."""

    node: int
    offset: int
    region: str
    addend: int


@dataclass(frozen=True)
class Slot:
    """Parameter bytes that the runtime sets by name (strides; addresses that change from call to call)."""

    name: str
    node: int
    offset: int
    size: int


@dataclass(frozen=True)
class Edge:
    """``target`` starts after ``source``; ``data`` is the driver's edge data, 8 bytes: zero for a full dependency."""

    source: int
    target: int
    data: bytes = bytes(8)


@dataclass(frozen=True)
class Template:
    """A graph without addresses: many records share one."""

    nodes: tuple[KernelNode, ...]
    edges: tuple[Edge, ...]
    relocations: tuple[Relocation, ...]
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class SpecEntry:
    """One attention specification of the catalog, with the memory that its graphs refer to.

    Attributes:
        attention: the specification.
        regions: every region of its graphs.
        capacity: what its work lists hold at most: where each array lies in ``meta`` and ``plan`` follows from it.
        planner: index of the template whose nodes check page numbers and make the work lists; -1 where the backend is
            ``cpu``.
    """

    attention: AttentionSpec
    regions: tuple[Region, ...]
    capacity: Capacity = field(default_factory=Capacity)
    planner: int = -1


@dataclass(frozen=True)
class Record:
    """One bucket of one specification.

    Attributes:
        spec: name of the specification.
        bucket: its shape.
        variant: the way it is computed, such as ``pod_sm90_w64`` or ``interpreter``; all records of a
            specification are of the same kernels.
        template: index of its template; -1 where the backend is ``cpu``.
        replay_us: duration of one replay of a full batch, microseconds; 0 where nothing was measured.
        max_error: worst relative error against the fp32 reference in the build's verification.
    """

    spec: str
    bucket: Bucket
    variant: str
    template: int
    replay_us: float = 0.0
    max_error: float = 0.0

    def in_setting(self, variant: str, template: int) -> Record:
        """The same bucket in another setting of pod_sm90: nothing was measured for it."""
        return replace(self, variant=variant, template=template, replay_us=0.0, max_error=0.0)


@dataclass(frozen=True)
class Fingerprint:
    """What a process must offer to replay the catalog; every field is compared by name.

    Attributes:
        backend: ``cuda`` or ``cpu``.
        compute_capability: such as ``9.0``; empty for ``cpu``.
        sm_count: multiprocessors that the grids were chosen for; 0 for ``cpu``.
        driver_min: least driver version, as the driver reports it (13000 is CUDA 13.0); 0 for ``cpu``.
    """

    backend: str
    compute_capability: str = ""
    sm_count: int = 0
    driver_min: int = 0


@dataclass(frozen=True)
class Catalog:
    """The whole content of one file.

    ``partition`` is how the planner has prefill and decode share a round of the grid, see `Policy`.
    """

    fingerprint: Fingerprint
    specs: dict[str, SpecEntry]
    max_pages: int
    max_kv_len: int
    templates: tuple[Template, ...]
    records: tuple[Record, ...]
    images: dict[str, bytes]
    built_with: dict[str, str] = field(default_factory=dict)
    partition: Partition = "tiles"

    def buckets(self, spec: str) -> tuple[Record, ...]:
        return tuple(r for r in self.records if r.spec == spec)

    @property
    def replayed(self) -> tuple[int, ...]:
        """Indices of the templates that buckets replay; the others are planners, which are launched by themselves."""
        return tuple(sorted({r.template for r in self.records if r.template >= 0}))

    def settings(self, spec: str) -> dict[str, int]:
        """Settings of pod_sm90 that the catalog holds for a specification, with their templates: variant -> index.

        Every bucket of the specification may be computed in each of them, whichever its own record names.
        """
        return {r.variant: r.template for r in self.buckets(spec) if kernels_of(r.variant) == "sm90"}

    def policy(self, spec: str) -> Policy:
        """The policy that a specification's work lists follow: that of its records' kernels."""
        variant = next((r.variant for r in self.records if r.spec == spec), "")
        return Policy.for_sms(self.fingerprint.sm_count, kernels_of(variant), self.partition)
