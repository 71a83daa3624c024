"""The face of the runtime: plan once per step, run once per layer, in FlashInfer's words."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Protocol

import torch

from podgraph.batch import Batch
from podgraph.catalog.model import Catalog, Record
from podgraph.dispatch.counters import Counters
from podgraph.dispatch.select import Selector
from podgraph.dispatch.tensors import Call, KVCache, check_call
from podgraph.errors import BucketOverflow, PodgraphError
from podgraph.planner import AnyWorkList, Policy, plan, preferred_setting
from podgraph.planner.policy import SM90

OnMiss = Literal["split", "error"]


class Backend(Protocol):
    """What a dispatcher asks of the place where work lists run."""

    device: torch.device

    def plan(self, parts: list[tuple[Record, AnyWorkList]]) -> None: ...
    def run(self, call: Call, counters: Counters, eager: bool) -> bool: ...
    def prewarm(self, records: Sequence[Record]) -> None: ...
    def reset(self) -> None: ...
    def memory(self) -> dict[str, int]: ...
    def close(self) -> None: ...


class Dispatcher:
    """One specification of a catalog, bound to one device and one stream. Made by `OpenCatalog.bind`.

    A dispatcher is not thread-safe, and everything it enqueues goes to its stream: q, the caches and out must be ready
    there. Use one dispatcher for each stream.

    Attributes:
        spec: the attention specification.
        counters: what happened since bind.
    """

    def __init__(
        self,
        catalog: Catalog,
        spec_name: str,
        backend: Backend,
        policy: Policy,
        on_miss: OnMiss = "split",
        padding_cap: float | None = None,
    ) -> None:
        self.spec = catalog.specs[spec_name].attention
        self.counters = Counters()
        self._records = catalog.buckets(spec_name)
        self._settings = catalog.settings(spec_name)
        self._catalog, self._policy, self._on_miss = catalog, policy, on_miss
        self._padding_cap = padding_cap
        self._selector = self._make_selector(self._records)
        self._backend = backend
        self._planned: list[tuple[Record, AnyWorkList]] | None = None
        self._rows, self._max_page = 0, -1
        self._captured: int | None = None
        self._closed = False

    @property
    def device(self) -> torch.device:
        return self._backend.device

    @property
    def max_kv_len(self) -> int:
        """KV tokens that one request may have."""
        return self._catalog.max_kv_len

    def plan(self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_last_page_len: Any) -> list[Record]:
        """Plans one step: a uniform batch, prefill and decode in any order. Every later `run` uses it.

        Args:
            qo_indptr: ``[n + 1]`` int32, query rows of each request, ``qo_indptr[0] = 0``.
            kv_indptr: ``[n + 1]`` int32, pages of each request.
            kv_indices: ``[kv_indptr[n]]`` int32, page numbers.
            kv_last_page_len: ``[n]`` int32, tokens in each request's last page.
                All four on the host or on the GPU; from the GPU they are copied to the host first.

        Returns:
            The records (buckets) that serve it, one unless the batch had to be split.

        Raises:
            BatchError: the arrays contradict one another or the catalog's limits; the previous plan stays in force.
            BucketMiss: no bucket holds the batch, and the dispatcher was bound with ``on_miss="error"``, or launches of
                it were captured: they serve later plans too, but only in buckets of the captured template.
        """
        self._check_open()
        arrays = [to_host(a) for a in (qo_indptr, kv_indptr, kv_indices, kv_last_page_len)]
        batch = Batch.of(*arrays, page_size=self.spec.page_size, max_kv_len=self.max_kv_len)
        if (self._on_miss == "error" or self._captured is not None) and batch.num_requests:
            self._selector.check(batch)
        parts = self._selector.parts(batch) if batch.num_requests else []
        return self._plan(batch, [(self._in_best_setting(record, part), part) for record, part in parts])

    def plan_into(self, record: Record, batch: Batch) -> None:
        """Plans a checked batch into a bucket of choice, as verification does.

        Raises:
            BucketOverflow: the bucket does not hold the batch.
        """
        self._check_open()
        self._plan(batch, [(record, batch)])

    def _plan(self, batch: Batch, parts: list[tuple[Record, Batch]]) -> list[Record]:
        for _, part in parts:
            if part.num_pages > self._catalog.max_pages:
                raise BucketOverflow(
                    f"the batch names {part.num_pages} pages, allowed: at most workspace.max_pages = "
                    f"{self._catalog.max_pages}"
                )
        planned = [
            (record, plan(part, record.bucket, self.spec, self._policy, record.variant)) for record, part in parts
        ]
        self._planned = None  # nothing may run half planned
        self._backend.plan(planned)
        self._planned = planned
        self._rows = int(batch.qo_indptr[-1])
        self._max_page = int(batch.kv_indices.max(initial=-1))
        self._count_plan(batch, planned)
        return [record for record, _ in planned]

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: KVCache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        *,
        eager: bool = False,
    ) -> torch.Tensor:
        """Attention of the planned batch over one layer's cache.

        Args:
            q: ``[rows, num_qo_heads, head_dim]`` in the spec's dtype; rows may be a slice of a wider tensor.
            paged_kv_cache: ``[pages, 2, page_size, num_kv_heads, head_dim]`` (NHD), or a (k, v) pair of
                ``[pages, page_size, num_kv_heads, head_dim]``.
            out: like q, contiguous; made where None. Rows beyond the planned batch's are not written.
            lse: ``[rows, num_qo_heads]`` float32 for the base-2 log-sum-exp of the logits, or None.
            eager: launch the kernels one by one instead of replaying their graph; the results are equal bit for bit.

        Returns:
            out.

        Raises:
            BatchError: a tensor does not fit the specification or the planned batch.
            PodgraphError: nothing is planned.
        """
        self._check_open()
        if self._planned is None:
            raise PodgraphError("run: nothing is planned; call plan() first")
        call = check_call(self.spec, self.device, self._rows, self._max_page, q, paged_kv_cache, out, lse)
        if self._backend.run(call, self.counters, eager):
            self._keep_to_captured_template()
        self.counters.runs += 1
        for record, _ in self._planned:
            self.counters.replays[str(record.bucket)] += 1
        return call.out

    def prewarm(self, records: Sequence[Record] | None = None) -> None:
        """Gives buckets an executable graph of their own, uploaded now; otherwise buckets of one template share one.

        Args:
            records: some of the catalog's records; all of the specification's where None.
        """
        self._check_open()
        self._backend.prewarm(self._records if records is None else records)

    def forget_captures(self) -> None:
        """Lets plans use every bucket again: the captured graphs that hold this dispatcher's launches are gone."""
        self._captured = None
        self._selector = self._make_selector(self._records)

    def _in_best_setting(self, record: Record, batch: Batch) -> Record:
        """The same bucket in the setting of pod_sm90 that is made for the batch, where the catalog holds it."""
        if len(self._settings) < 2:
            return record
        variant = SM90 + preferred_setting(batch, self.spec)
        template = self._settings.get(variant)
        if template is None or variant == record.variant or self._captured not in (None, template):
            return record
        return record.in_setting(variant, template)

    def _make_selector(self, records: Sequence[Record]) -> Selector:
        return Selector(records, self.spec, self._catalog.max_pages, self._padding_cap)

    def _keep_to_captured_template(self) -> None:
        """A captured launch serves whatever is planned later, but only into buckets of its own template."""
        assert self._planned is not None
        templates = {record.template for record, _ in self._planned}
        if not templates:
            return
        (template,) = templates
        if self._captured not in (None, template):
            raise PodgraphError(
                "run: another template of this dispatcher was captured before, and both graphs would follow every "
                "later plan; bind a second dispatcher, or call forget_captures() if the first graph is gone"
            )
        if self._captured is None:
            self._captured = template
            self._selector = self._make_selector([r for r in self._records if r.template == template])

    def reset(self) -> None:
        """Forgets the plan, fills the scratch memory with NaN and zeroes its counters: the state after bind."""
        self._check_open()
        self._planned = None
        self._backend.reset()

    def memory(self) -> dict[str, int]:
        """Bytes that the runtime holds, by kind."""
        return self._backend.memory()

    def close(self) -> None:
        """Waits for the stream and frees everything; calling it twice is fine."""
        if not self._closed:
            self._closed = True
            self._planned = None
            self._backend.close()

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise PodgraphError("this dispatcher is closed; bind the catalog again")

    def _count_plan(self, batch: Batch, planned: list[tuple[Record, AnyWorkList]]) -> None:
        c = self.counters
        c.plans += 1
        if len(planned) > 1:
            pages = batch.num_pages > self._catalog.max_pages
            c.splits["more pages than workspace.max_pages" if pages else "no bucket holds the batch"] += 1
        for record, work in planned:
            demand = work.batch.demand(self.spec)
            overflow = max(0, demand.decodes - record.bucket.decode_count)
            c.over_padding_cap += self._selector.over_cap(record, demand)
            c.padded_rows += record.bucket.prefill_len - demand.prefill_rows - demand.rows_of(overflow)
            c.padded_slots += record.bucket.batch - work.batch.num_requests


def to_host(array: Any) -> Any:
    """Torch tensors, wherever they are, as numpy; anything else as it is."""
    return array.cpu().numpy() if isinstance(array, torch.Tensor) else array
