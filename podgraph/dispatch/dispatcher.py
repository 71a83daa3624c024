"""The face of the runtime: plan once per step, run once per layer, in FlashInfer's words."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

import torch

from podgraph import driver
from podgraph.batch import Batch, check_hints
from podgraph.catalog.model import Catalog, Record
from podgraph.dispatch.again import Planned, RunsAgain
from podgraph.dispatch.backends import Backend, DeviceBackend
from podgraph.dispatch.calls import Call, CallChecker, output_of
from podgraph.dispatch.counters import CAPTURED_TEMPLATE, NO_BUCKET, TOO_MANY_PAGES, Counters
from podgraph.dispatch.in_place import InPlace
from podgraph.dispatch.planning import Addresses
from podgraph.dispatch.select import Selector
from podgraph.dispatch.tensors import DTYPES, Cache, KVCache, check_cache, to_host
from podgraph.dispatch.turns import Turns
from podgraph.errors import BatchError, BucketMiss, BucketOverflow, CudaError, PodgraphError
from podgraph.planner import preferred_setting
from podgraph.planner.policy import SM90
from podgraph.shapes import Bucket

OnMiss = Literal["split", "error"]


class Dispatcher:
    """One specification of a catalog, bound to one device and one stream. Made by `OpenCatalog.bind`.

    A dispatcher serves one stream and one thread at a time: everything it enqueues goes to its stream, which must be
    torch's current one in each call; a call while another thread's is under way is refused. Use one dispatcher for each
    stream; they share what they were bound from.

    Attributes:
        spec: the attention specification.
    """

    def __init__(
        self,
        catalog: Catalog,
        spec_name: str,
        backend: Backend,
        counters: Counters,
        on_miss: OnMiss = "split",
        padding_cap: float | None = None,
        kv_caches: Sequence[KVCache] = (),
    ) -> None:
        self.spec = catalog.specs[spec_name].attention
        self._counters = counters
        self._spec_name, self._records = spec_name, catalog.buckets(spec_name)
        self._by_bucket = {r.bucket: r for r in self._records}
        self._settings = catalog.settings(spec_name)
        self._templates = {r.template for r in self._records} | set(self._settings.values())
        self._in_setting: dict[tuple[Record, str], Record] = {}
        self._catalog, self._on_miss = catalog, on_miss
        self._padding_cap = padding_cap
        self._backend = backend
        self._device_backend = backend if isinstance(backend, DeviceBackend) else None
        self._planned: Planned | None = None
        self._rows, self._max_page = 0, -1
        self._captured: int | None = None  # template that captured launches belong to
        self._plan_capture = 0  # the capture that holds the plan
        self._kept: Sequence[Any] = ()
        self._device = backend.device
        self._turns = Turns(self._device_backend)
        self._checker = CallChecker(self.spec, self._device)
        self._calls: dict[int | None, Call] = {}  # the last one of each layer
        self._again = RunsAgain()
        self._capturing: Callable[[], bool] = bool if self._device_backend is None else self._device_backend.capturing
        self._caches: list[Cache] = []
        for i, cache in enumerate(kv_caches):
            try:
                self._caches.append(check_cache(self.spec, self._device, cache))
                self._caches[-1].maps = backend.describe(self._caches[-1])
            except BatchError as e:
                raise BatchError(f"kv_caches[{i}]: {e}") from None
        self._pages = min((c.pages for c in self._caches), default=0)
        self._use_records(self._records)

    @property
    def counters(self) -> Counters:
        """What happened since bind."""
        self._again.count(self._counters, self._planned)
        return self._counters

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def max_kv_len(self) -> int:
        """KV tokens that one request may have."""
        return self._catalog.max_kv_len

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_last_page_len: Any,
        *,
        prefill_len: int | None = None,
        decode_count: int | None = None,
        bucket: Bucket | None = None,
        check_pages: bool = False,
    ) -> list[Record]:
        """Plans one step: a uniform batch, prefill and decode in any order. Every later `run` uses it.

        Each array may lie on the host or on the GPU. Those on the GPU are read there, by the planner and (kv_indices)
        by the attention itself, when the stream comes to it: nothing is copied, nothing waits, and they must stay as
        they are until the step's last `run` is done. What is wrong with them is found on the GPU: the step then
        computes nothing, and the next `plan` or `check` raises.

        The bucket is chosen on the host: from ``qo_indptr`` where it lies there, else from ``prefill_len`` and
        ``decode_count``, else it is named by ``bucket``.

        Args:
            qo_indptr: ``[n + 1]`` int32, query rows of each request, ``qo_indptr[0] = 0``.
            kv_indptr: ``[n + 1]`` int32, pages of each request.
            kv_indices: ``[kv_indptr[n]]`` int32 or longer, page numbers.
            kv_last_page_len: ``[n]`` int32, tokens in each request's last page.
            prefill_len: query rows of all requests that prefill. A step for which this is not true is refused.
            decode_count: requests that decode; likewise.
            bucket: one of the catalog's buckets; q and out then need as many rows as it has. The choice for a plan that
                is captured: later replays may bring any batch that fits it.
            check_pages: have the GPU check that every page number lies in the bound ``kv_caches``.

        Returns:
            The records (buckets) that serve it, one unless the batch had to be split.

        Raises:
            BatchError: the arrays contradict one another, the hints or the catalog's limits, or an earlier step was
                refused on the GPU; the previous plan stays in force.
            BucketOverflow: the named bucket does not hold the batch, or the batch names more than workspace.max_pages
                pages.
            BucketMiss: no bucket holds the batch, and the dispatcher was bound with ``on_miss="error"``, or metadata
                lie on the GPU (a batch is split on the host), or launches were captured: these serve later plans too,
                but only in buckets of the captured template.
            PodgraphError: the current stream is not the one that was bound, another thread is in a call, or host
                metadata were given while the stream captures.
        """
        turns = self._turns
        if not turns.take():
            turns.refuse()
        try:
            if turns.unusable or turns.current_stream() != turns.stream or not turns.thread.entered:
                turns.enter()
            if (prefill_len is not None or decode_count is not None) and not (
                type(prefill_len) is type(decode_count) is int and 0 <= prefill_len < MAX_HINT > decode_count >= 0
            ):
                prefill_len, decode_count = _hint("prefill_len", prefill_len), _hint("decode_count", decode_count)
            backend = self._device_backend
            arrays = qo_indptr, kv_indptr, kv_last_page_len, kv_indices
            if backend is None:
                return self._plan_from_host(arrays, prefill_len, decode_count, bucket)
            if backend.report[0]:
                backend.raise_refusal()
            addresses = self._in_place.addresses(*arrays)
            if addresses is None and not any(isinstance(a, torch.Tensor) and a.is_cuda for a in arrays):
                return self._plan_from_host(arrays, prefill_len, decode_count, bucket)
            return self._plan_in_place(backend, arrays, addresses, prefill_len, decode_count, bucket, check_pages)
        except CudaError as e:
            raise self._broken(e) from None
        finally:
            turns.give()

    def _plan_from_host(
        self, arrays: Sequence[Any], prefill_len: int | None, decode_count: int | None, bucket: Bucket | None
    ) -> list[Record]:
        qo_indptr, kv_indptr, last, indices = (to_host(a) for a in arrays)
        batch = Batch.of(qo_indptr, kv_indptr, indices, last, page_size=self.spec.page_size, max_kv_len=self.max_kv_len)
        demand = batch.demand(self.spec)
        check_hints(demand, prefill_len, decode_count)
        if bucket is not None:
            return self._plan(batch, [(self._named(bucket), batch)])
        if (self._on_miss == "error" or self._captured is not None) and batch.num_requests:
            try:
                self._selector.check(batch)
            except BucketMiss as miss:
                self.counters.misses[CAPTURED_TEMPLATE if self._captured is not None else miss.reason] += 1
                raise
        parts = self._selector.parts(batch) if batch.num_requests else []
        return self._plan(batch, [(self._in_best_setting(record, part), part) for record, part in parts])

    def _plan_in_place(
        self,
        backend: DeviceBackend,
        arrays: Sequence[Any],
        addresses: Addresses | None,
        prefill_len: int | None,
        decode_count: int | None,
        bucket: Bucket | None,
        check_pages: bool,
    ) -> list[Record]:
        """Plans a step with metadata on the GPU; some arrays may still lie on the host."""
        capture = backend.capture_id() if self._capturing() else 0
        if addresses is None:
            arrays, addresses = self._in_place.check(arrays)
        try:
            choice, n, indices = self._in_place.choose(
                arrays, addresses, prefill_len, decode_count, None if bucket is None else self._named(bucket)
            )
        except BucketMiss as miss:
            self.counters.misses[CAPTURED_TEMPLATE if self._captured is not None else miss.reason] += 1
            raise
        if check_pages and not self._pages:
            raise BatchError("check_pages: no cache is bound; bind with kv_caches=")
        if capture:
            if 0 in addresses:
                raise PodgraphError(HOST_WHILE_CAPTURING)
            prefill_len = decode_count = None  # a captured plan is replayed with other numbers than these
        self._forget_plan()  # nothing may run half planned
        backend.plan_in_place(
            choice.record,
            arrays,
            addresses,
            n,
            indices,
            choice.rows,
            self._pages if check_pages else 0,
            -1 if prefill_len is None else prefill_len,
            -1 if decode_count is None else decode_count,
        )
        self._kept = arrays  # kv_indices are read by each run: temporaries must not be given to somebody else before
        self._plan_done(choice.names, choice.rows, -1, capture)
        counters = self._counters
        counters.plans += 1
        counters.padded_rows += choice.padded_rows
        counters.padded_slots += choice.padded_slots
        counters.over_padding_cap += choice.over_cap
        return [choice.record]

    def _named(self, bucket: Bucket) -> Record:
        record = self._by_bucket.get(bucket) if isinstance(bucket, Bucket) else None
        if record is None:
            raise BatchError(f"bucket: got {bucket}, allowed: one of the catalog's (podgraph inspect lists them)")
        if self._captured not in (None, record.template):
            self.counters.misses[CAPTURED_TEMPLATE] += 1
            message = f"bucket {bucket}: captured launches of this dispatcher belong to another template"
            raise BucketMiss(message, CAPTURED_TEMPLATE)
        return record

    def plan_into(self, record: Record, batch: Batch) -> None:
        """Plans a checked batch into a bucket of choice, as verification does.

        Raises:
            BatchError: the record is not of this specification.
            BucketOverflow: the bucket does not hold the batch.
        """
        with self._turn():
            self._check_records([record])
            self._backend.raise_refusal()
            self._plan(batch, [(record, batch)])

    def _plan(self, batch: Batch, parts: list[tuple[Record, Batch]]) -> list[Record]:
        if self._capturing():
            raise PodgraphError(HOST_WHILE_CAPTURING)
        for record, part in parts:
            if part.num_pages > self._catalog.max_pages:
                raise BucketOverflow(
                    f"the batch names {part.num_pages} pages, allowed: at most workspace.max_pages = "
                    f"{self._catalog.max_pages}"
                )
            demand = part.demand(self.spec)
            if not record.bucket.fits(demand):
                raise BucketOverflow(
                    f"bucket {record.bucket} does not hold {demand.requests} requests: {demand.prefills} prefills of "
                    f"{demand.prefill_rows} rows, {demand.decodes} decodes; choose a larger one or split the batch"
                )
        rows = int(batch.qo_indptr[-1])
        self._forget_plan()  # nothing may run half planned
        self._backend.plan(parts, rows)
        names = tuple((record, str(record.bucket)) for record, _ in parts)
        self._plan_done(names, rows, int(batch.kv_indices.max(initial=-1)), 0)
        self._count_plan(batch, parts)
        return [record for record, _ in parts]

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: KVCache | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        *,
        layer: int | None = None,
        eager: bool = False,
    ) -> torch.Tensor:
        """Attention of the planned batch over one layer's cache.

        Args:
            q: ``[rows, num_qo_heads, head_dim]`` in the spec's dtype; rows may be a slice of a wider tensor.
            paged_kv_cache: ``[pages, 2, page_size, num_kv_heads, head_dim]`` (NHD), or a (k, v) pair of
                ``[pages, page_size, num_kv_heads, head_dim]``; or leave it out and name a bound one by ``layer``.
            out: like q, contiguous; made where None. Rows beyond the planned batch's are not written.
            lse: ``[rows, num_qo_heads]`` float32 for the base-2 log-sum-exp of the logits, or None.
            layer: number of a cache among the ``kv_caches`` of bind.
            eager: launch the kernels one by one instead of replaying their graph; the results are equal bit for bit.

        Returns:
            out.

        Raises:
            BatchError: a tensor does not fit the specification or the planned batch.
            PodgraphError: nothing is planned, or the current stream is not the one that was bound.
        """
        turns = self._turns
        if not turns.take():
            turns.refuse()
        try:
            if turns.unusable or turns.current_stream() != turns.stream or not turns.thread.entered:
                turns.enter()
            again = self._again
            repeat = again.layers.get(layer) if type(layer) is int else None
            if repeat is not None and paged_kv_cache is None and not eager and not self._capturing():
                call = self._calls[layer]
                came = call.same(q, out, lse, self._rows)
                if not came:
                    if out is None:
                        out = output_of(q)
                    call = self._calls[layer] = self._checker.check(self._rows, q, out, lse)
                if call.key == repeat.held and repeat.replay is not None:
                    again.replays += 1
                    status = repeat.replay()
                elif repeat.alone is not None and not came:
                    again.lone += 1
                    status = repeat.alone(call)
                else:
                    return self._run(q, paged_kv_cache, out, lse, layer, eager)
                if status:
                    driver.fail_launch(status)
                return out  # type: ignore[return-value]
            return self._run(q, paged_kv_cache, out, lse, layer, eager)
        except CudaError as e:
            raise self._broken(e) from None
        finally:
            turns.give()

    def _run(
        self,
        q: torch.Tensor,
        paged_kv_cache: KVCache | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        layer: int | None,
        eager: bool,
    ) -> torch.Tensor:
        """A run that is more than one launch of something known."""
        if self._planned is None:
            raise PodgraphError("run: nothing is planned; call plan() first")
        if layer is None:
            if paged_kv_cache is None:
                raise BatchError("run: got no cache, allowed: paged_kv_cache, or layer= of a bound one")
            cache = check_cache(self.spec, self._device, paged_kv_cache)
        elif paged_kv_cache is not None:
            raise BatchError("run: got paged_kv_cache and layer, allowed: one of them")
        else:
            layer = _integer("layer", layer, len(self._caches), f"one of the {len(self._caches)} bound kv_caches")
            cache = self._caches[layer]
        call = self._calls.get(layer)
        came = call is not None and call.same(q, out, lse, self._rows)
        if call is None or not came:
            if out is None:
                out = output_of(q)
            call = self._calls[layer] = self._checker.check(self._rows, q, out, lse)
        if cache.pages <= self._max_page:
            raise BatchError(f"kv_indices: got page {self._max_page}, allowed: below the cache's {cache.pages}")
        assert out is not None
        if self._capturing():
            self._check_capture()
        if layer is not None:
            self._again.layers.pop(layer, None)  # the exec may come to hold other addresses now
        mode, repeat = self._backend.run(call, cache, q, out, lse, layer, came, eager)
        if mode == "captured":
            self._keep_to_captured_template()
        if repeat is not None and layer is not None and self._pages > self._max_page:
            self._again.layers[layer] = repeat
        counters = self._counters
        counters.runs += 1
        for _, name in self._planned:
            counters.replays[name] += 1
            counters.replays_by_mode[mode] += 1
        return out

    def _plan_done(self, planned: Planned, rows: int, max_page: int, capture: int) -> None:
        """What every plan ends with."""
        self._planned, self._rows, self._max_page, self._plan_capture = planned, rows, max_page, capture
        self._again.plan(planned, max_page < self._pages)

    def _forget_plan(self) -> None:
        """Nothing is planned any more; what ran by the plan is counted."""
        self._again.count(self._counters, self._planned)
        self._planned, self._again.layers = None, {}

    def check(self) -> None:
        """Waits for the stream, and raises what the GPU found wrong with the steps so far.

        Raises:
            BatchError: a step was refused, and computed nothing.
        """
        with self._turn():
            self._backend.synchronize()
            self._backend.raise_refusal()

    def prewarm(self, records: Sequence[Record] | None = None) -> None:
        """Makes and uploads the executable graphs that buckets need, for every bound layer.

        Args:
            records: some of the catalog's records; all of the specification's where None.
        """
        with self._turn():
            layers = range(len(self._caches)) if self._caches else (None,)
            self._backend.prewarm(self._records if records is None else self._check_records(records), layers)

    def dedicate(self, records: Sequence[Record] | None = None) -> None:
        """Gives buckets an executable graph of their own, uploaded now; otherwise buckets of one template share one.

        Args:
            records: some of the catalog's records; all of the specification's where None.
        """
        with self._turn():
            self._again.clear()
            self._backend.dedicate(self._records if records is None else self._check_records(records))

    def static_buffers(self, lse: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(q, out, lse) with room for the largest bucket, for callers that keep theirs in one place.

        What always lies there is never patched into a graph again. They are yours: made anew by each call.

        Args:
            lse: make one too.
        """
        rows = max(record.bucket.rows(self.spec) for record in self._records)
        q = torch.zeros(
            rows, self.spec.num_qo_heads, self.spec.head_dim, dtype=DTYPES[self.spec.dtype], device=self._device
        )
        return q, torch.empty_like(q), torch.empty(q.shape[:2], device=self._device) if lse else None

    def forget_captures(self) -> None:
        """Lets plans use every bucket again: the captured graphs that hold this dispatcher's launches are gone."""
        with self._turn():
            self._captured = None
            self._use_records(self._records)

    def _check_records(self, records: Sequence[Record]) -> Sequence[Record]:
        """The records, where all of them are of this specification.

        Raises:
            BatchError: naming the first that is not.
        """
        for record in records:
            own = self._by_bucket.get(record.bucket) if isinstance(record, Record) else None
            if own is None or record.spec != self._spec_name or record.template not in self._templates:
                raise BatchError(
                    f"records: got {record!r}, allowed: those of specification {self._spec_name} in this catalog"
                )
        return records

    def _in_best_setting(self, record: Record, batch: Batch) -> Record:
        """The same bucket in the setting of pod_sm90 that is made for the batch, where the catalog holds it."""
        if len(self._settings) < 2:
            return record
        variant = SM90 + preferred_setting(batch, self.spec)
        template = self._settings.get(variant)
        if template is None or variant == record.variant or self._captured not in (None, template):
            return record
        if (record, variant) not in self._in_setting:
            self._in_setting[record, variant] = record.in_setting(variant, template)
        return self._in_setting[record, variant]

    def _use_records(self, records: Sequence[Record]) -> None:
        """From now on plans choose among these."""
        self._selector = Selector(records, self.spec, self._catalog.max_pages, self._padding_cap)
        strict = self._on_miss == "error"
        self._in_place = InPlace(self.spec, self._device, self._selector, strict)

    def _check_capture(self) -> None:
        """Refuses a run that cannot become part of somebody's capture.

        Raises:
            PodgraphError: the batch was cut, or another template was captured before.
        """
        assert self._planned is not None
        if len(self._planned) > 1:
            raise PodgraphError("run: a batch that was split cannot be captured; capture one that a bucket holds")
        other = self._captured is not None and any(record.template != self._captured for record, _ in self._planned)
        if other and not self._plan_is_captured():
            raise PodgraphError(
                "run: another template of this dispatcher was captured before, and both graphs would follow every "
                "later plan; bind a second dispatcher, or call forget_captures() if the first graph is gone"
            )

    def _plan_is_captured(self) -> bool:
        """Whether the capture that the stream is in holds the plan too: nothing else then reaches its launches."""
        return self._device_backend is not None and self._plan_capture == self._device_backend.capture_id()

    def _keep_to_captured_template(self) -> None:
        """A captured launch serves whatever is planned later, but only into buckets of its own template."""
        assert self._planned is not None
        if self._captured is None and self._planned and not self._plan_is_captured():
            self._captured = self._planned[0][0].template
            self._use_records([r for r in self._records if r.template == self._captured])

    def reset(self) -> None:
        """Forgets the plan, fills the scratch memory with NaN and zeroes its counters: the state after bind."""
        with self._turn():
            self._forget_plan()
            self._backend.reset()

    def memory(self) -> dict[str, int]:
        """Bytes that the runtime holds, by kind."""
        return self._backend.memory()

    def close(self) -> None:
        """Waits for the stream and frees everything; calling it twice is fine.

        Raises:
            PodgraphError: another thread is in a call.
            CudaError: something that ran before failed on the GPU.
        """
        if self._turns.over:
            return
        with self._turns.last():
            self._forget_plan()
            self._again.clear()
            self._caches, self._calls, self._kept = [], {}, ()
            self._backend.close()

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.close()
        except CudaError:
            if error is None:  # else it is known, and what the body raised says more
                raise

    def _broken(self, error: CudaError) -> CudaError:
        """What to raise for an error of the driver: where the device itself failed, nothing works any more."""
        self._forget_plan()
        self._turns.fail(error)
        return error

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One call, whatever torch's current stream is."""
        with self._turns.one():
            try:
                yield
            except CudaError as e:
                raise self._broken(e) from None

    def _count_plan(self, batch: Batch, parts: list[tuple[Record, Batch]]) -> None:
        c = self.counters
        c.plans += 1
        if len(parts) > 1:
            c.splits[TOO_MANY_PAGES if batch.num_pages > self._catalog.max_pages else NO_BUCKET] += 1
        for record, part in parts:
            padded_rows, padded_slots, over_cap = self._selector.padding(record, part.demand(self.spec))
            c.padded_rows += padded_rows
            c.padded_slots += padded_slots
            c.over_padding_cap += over_cap


MAX_HINT = 1 << 31
HOST_WHILE_CAPTURING = (
    "plan: host metadata cannot be planned while the stream captures; plan before the capture, or bring all four "
    "arrays to the GPU"
)


def _integer(name: str, value: Any, below: int, allowed: str) -> int:
    """A whole number from 0.

    Raises:
        BatchError: it is none, or too large.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < below:
        raise BatchError(f"{name}: got {value!r}, allowed: {allowed}, from 0")
    return number


def _hint(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value, MAX_HINT, "a whole number below 2^31")
