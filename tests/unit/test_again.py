"""A run that comes again just as it was is one launch of what ran before, and nothing else ever is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_dispatcher import MIXED, SPEC, catalog_of, tensors_of

from podgraph.batch import Batch
from podgraph.catalog.model import Record
from podgraph.dispatch.backends import DeviceBackend
from podgraph.dispatch.counters import Counters
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.tensors import Cache, Call
from podgraph.errors import BatchError, CudaError
from podgraph.shapes import Bucket

MIXED_BUCKET = Bucket(4, 16, 2)
SMALL = Batch.of([0, 1], [0, 1], [0], [3], page_size=16, max_kv_len=800)


class Device:
    """A backend that remembers what was asked of it, and what would replay each (template, layer) again."""

    device = torch.device("cpu")
    stream = 0

    def __init__(self) -> None:
        self.report = [0, 0, 0, 0]
        self.is_captured = False
        self.template = 0
        self.runs: list[tuple[int, int | None, Call]] = []
        self.again: list[tuple[int, int | None, Call]] = []
        self.status = 0
        self.offers = True

    def capturing(self) -> bool:
        return self.is_captured

    def capture_id(self) -> int:
        return int(self.is_captured)

    def plan(self, parts: list[tuple[Record, Batch]], rows: int) -> None:
        self.template = parts[0][0].template if parts else 0

    def plan_in_place(self, record: Record, *arguments: Any) -> None:
        self.template = record.template

    def run(
        self, call: Call, cache: Cache, q: Any, out: Any, lse: Any, layer: int | None, eager: bool
    ) -> tuple[str, Callable[[], int] | None]:
        asked = self.template, layer, call
        self.runs.append(asked)

        def launch() -> int:
            self.again.append(asked)
            return self.status

        return "eager" if eager else "graph", launch if self.offers and not eager else None

    def describe(self, cache: Cache) -> int:
        return 1

    def raise_refusal(self) -> None:
        raise BatchError("refused")

    def nothing(self, *arguments: Any) -> None:
        pass

    synchronize = prewarm = dedicate = reset = close = nothing

    def memory(self) -> dict[str, int]:
        return {}


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def dispatcher(device: Device) -> Dispatcher:
    content = catalog_of()
    records = tuple(Record(r.spec, r.bucket, r.variant, template) for template, r in enumerate(content.records))
    from dataclasses import replace

    caches = [(t.k, t.v) for t in (tensors_of(MIXED, 0), tensors_of(MIXED, 1))]
    used: Any = device
    return Dispatcher(replace(content, records=records), "tiny", used, Counters(), kv_caches=caches)


def plan(dispatcher: Dispatcher, batch: Batch, bucket: Bucket | None = None) -> None:
    dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len, bucket=bucket)


def tensors(rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.zeros(rows, SPEC.num_qo_heads, SPEC.head_dim, dtype=torch.bfloat16)
    return q, torch.empty_like(q)


def test_the_same_tensors_of_a_layer_are_one_launch(dispatcher: Dispatcher, device: Device) -> None:
    assert isinstance(device, DeviceBackend)
    plan(dispatcher, MIXED)
    layers = [tensors(), tensors()]
    for step in range(4):
        for layer, (q, out) in enumerate(layers):
            assert dispatcher.run(q, layer=layer, out=out) is out
        plan(dispatcher, MIXED)
        assert len(device.runs) == 2, step
        assert len(device.again) == 2 * step
    assert [asked[1] for asked in device.again] == [0, 1] * 3
    assert dispatcher.counters.runs == 8
    assert sum(dispatcher.counters.replays.values()) == 8
    assert dispatcher.counters.replays_by_mode == {"graph": 8}


def test_other_tensors_are_another_run(dispatcher: Dispatcher, device: Device) -> None:
    plan(dispatcher, MIXED)
    (q, out), (other, elsewhere) = tensors(), tensors()
    lse = torch.empty(7, SPEC.num_qo_heads)
    dispatcher.run(q, layer=0, out=out)
    for arguments in ((other, out, None), (q, elsewhere, None), (q, out, lse), (q.clone(), out, None)):
        before = len(device.again)
        dispatcher.run(arguments[0], layer=0, out=arguments[1], lse=arguments[2])
        assert len(device.again) == before
        dispatcher.run(q, layer=0, out=out)  # the exec held other addresses in between
        assert len(device.again) == before
        dispatcher.run(q, layer=0, out=out)
        assert len(device.again) == before + 1
    before = len(device.again)
    dispatcher.run(q, layer=1, out=out)
    dispatcher.run(q, layer=0, out=out, eager=True)
    assert len(device.again) == before
    dispatcher.run(q, layer=0)  # an out of its own each time
    dispatcher.run(q, layer=0)
    assert len(device.again) == before


def test_a_tensor_that_changed_its_memory_or_rows_is_checked_again(dispatcher: Dispatcher, device: Device) -> None:
    plan(dispatcher, SMALL)
    q, out = tensors(1)
    for _ in range(2):
        dispatcher.run(q, layer=0, out=out)
    assert len(device.again) == 1
    plan(dispatcher, MIXED)
    with pytest.raises(BatchError, match="q: got 1 rows"):
        dispatcher.run(q, layer=0, out=out)
    q, out = tensors()
    for _ in range(2):
        dispatcher.run(q, layer=0, out=out)
    before = len(device.again)
    q.set_(tensors()[0])  # the same object, elsewhere
    dispatcher.run(q, layer=0, out=out)
    assert len(device.again) == before
    dispatcher.run(q, layer=0, out=out)
    q.resize_(3, SPEC.num_qo_heads, SPEC.head_dim)
    with pytest.raises(BatchError, match="q: got 3 rows"):
        dispatcher.run(q, layer=0, out=out)


def test_each_template_has_its_own(dispatcher: Dispatcher, device: Device) -> None:
    q, out = tensors()
    first, second = dispatcher._records[0].bucket, dispatcher._records[2].bucket
    for _ in range(3):
        for bucket in (first, second):
            plan(dispatcher, SMALL, bucket)
            dispatcher.run(q, layer=0, out=out)
    assert [asked[0] for asked in device.runs] == [0, 2]
    assert [asked[0] for asked in device.again] == [0, 2, 0, 2]
    dispatcher.dedicate()
    plan(dispatcher, SMALL, first)
    dispatcher.run(q, layer=0, out=out)
    assert len(device.runs) == 3


def test_a_capture_a_page_beyond_and_a_backend_that_does_not_offer(dispatcher: Dispatcher, device: Device) -> None:
    q, out = tensors()
    plan(dispatcher, MIXED)
    for _ in range(2):
        dispatcher.run(q, layer=0, out=out)
    device.is_captured = True
    dispatcher.run(q, layer=0, out=out)
    assert len(device.runs) == 2
    device.is_captured = False
    pages = dispatcher._pages
    far = Batch.of([0, 1], [0, 1], [pages], [3], page_size=16, max_kv_len=800)
    plan(dispatcher, far)
    with pytest.raises(BatchError, match=f"got page {pages}"):
        dispatcher.run(q, layer=0, out=out)
    device.offers = False
    plan(dispatcher, MIXED)
    before = len(device.again)
    for _ in range(3):
        dispatcher.run(q, layer=1, out=out)
    assert len(device.again) == before


def test_a_launch_that_fails_is_raised(dispatcher: Dispatcher, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from podgraph import driver

    def fail(status: int) -> None:
        raise CudaError(f"cuGraphLaunch: {status}")

    monkeypatch.setattr(driver, "fail_launch", fail)
    q, out = tensors()
    plan(dispatcher, MIXED)
    dispatcher.run(q, layer=0, out=out)
    device.status = 700
    with pytest.raises(CudaError, match="cuGraphLaunch: 700"):
        dispatcher.run(q, layer=0, out=out)


def test_metadata_live_as_long_as_their_plan(
    dispatcher: Dispatcher, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporaries that nobody else holds: their memory must not go to another tensor before the runs."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    dispatcher._in_place._index = -1  # what get_device() says of a tensor on the host

    def arrays() -> list[torch.Tensor]:
        return [torch.tensor(a, dtype=torch.int32) for a in ([0, 1], [0, 1], [0], [3])]

    first = arrays()
    watched = [weakref.ref(a) for a in first]
    dispatcher.plan(*first, bucket=MIXED_BUCKET)
    del first
    gc.collect()
    assert all(w() is not None for w in watched)
    dispatcher.plan(*arrays(), bucket=MIXED_BUCKET)
    gc.collect()
    assert all(w() is None for w in watched)


def test_what_the_gpu_refused_is_raised_by_the_next_plan(dispatcher: Dispatcher, device: Device) -> None:
    plan(dispatcher, MIXED)
    device.report[0] = 3
    with pytest.raises(BatchError, match="refused"):
        plan(dispatcher, MIXED)
