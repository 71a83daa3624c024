"""Runs of bound layers that are one launch: of what ran before at the same addresses, or of a lone kernel."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_dispatcher import MIXED, SPEC, catalog_of, tensors_of

from podgraph.batch import Batch
from podgraph.catalog.model import Record
from podgraph.dispatch.again import Repeat
from podgraph.dispatch.backends import DeviceBackend
from podgraph.dispatch.calls import Call
from podgraph.dispatch.counters import Counters
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.tensors import Cache
from podgraph.errors import BatchError, BucketMiss, CudaError, PodgraphError
from podgraph.shapes import Bucket

MIXED_BUCKET = Bucket(4, 16, 2)
SMALL = Batch.of([0, 1], [0, 1], [0], [3], page_size=16, max_kv_len=800)


Asked = tuple[int, int | None, tuple[int, ...]]


class Device:
    """A backend that remembers what was asked of it, and how each (template, layer) ran again.

    Attributes:
        runs, again, alone: (template, layer, the call's key) of what `run` did, and of what was launched without it.
        held: what the graph of each (template, layer) holds.
        lone: whether its templates are single kernels.
    """

    device = torch.device("cpu")
    stream = 0

    def __init__(self) -> None:
        self.report = [0, 0, 0, 0]
        self.is_captured = False
        self.template = 0
        self.runs: list[Asked] = []
        self.again: list[Asked] = []
        self.alone: list[Asked] = []
        self.held: dict[tuple[int, int | None], tuple[int, ...]] = {}
        self.status = 0
        self.offers, self.lone = True, False
        self.entered: list[int] = []

    def enter_thread(self) -> None:
        self.entered.append(threading.get_ident())

    def capturing(self) -> bool:
        return self.is_captured

    def capture_id(self) -> int:
        return int(self.is_captured)

    def plan(self, parts: list[tuple[Record, Batch]], rows: int) -> None:
        self.template = parts[0][0].template if parts else 0

    def plan_in_place(self, record: Record, *arguments: Any) -> None:
        self.template = record.template

    def run(
        self, call: Call, cache: Cache, q: Any, out: Any, lse: Any, layer: int | None, came: bool, eager: bool
    ) -> tuple[str, Repeat | None]:
        template = self.template
        self.runs.append((template, layer, call.key))
        eager |= self.lone and not came and self.held.get((template, layer)) != call.key
        if not (eager or self.is_captured):
            self.held[template, layer] = call.key

        def replay() -> int:
            self.again.append((template, layer, self.held[template, layer]))
            return self.status

        def alone(call: Call) -> int:
            self.alone.append((template, layer, call.key))
            return self.status

        held = self.held.get((template, layer), ())
        repeat = Repeat(held, replay if held else None, alone if self.lone else None)
        mode = "captured" if self.is_captured else "eager" if eager else "graph"
        return mode, repeat if self.offers and not self.is_captured else None

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
    kept = [dispatcher.run(q, layer=0) for _ in range(2)]  # an out of its own each time
    assert kept[0].data_ptr() != kept[1].data_ptr()
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


def test_a_lone_kernel_goes_by_itself_until_the_same_tensors_come_again(dispatcher: Dispatcher, device: Device) -> None:
    device.lone = True
    plan(dispatcher, MIXED)
    sets = [tensors() for _ in range(4)]
    for q, out in sets:  # each at addresses of its own
        dispatcher.run(q, layer=0, out=out)
    assert len(device.runs) == 1
    assert len(device.alone) == 3
    q, out = sets[-1]
    dispatcher.run(q, layer=0, out=out)  # again: now a graph is made
    assert (len(device.runs), len(device.alone), len(device.again)) == (2, 3, 0)
    dispatcher.run(q, layer=0, out=out)
    assert len(device.again) == 1
    dispatcher.run(*[sets[0][0]], layer=0, out=sets[0][1])  # elsewhere: the graph keeps what it holds
    dispatcher.run(q, layer=0, out=out)
    assert (len(device.runs), len(device.alone), len(device.again)) == (2, 4, 2)
    view, out_view = q[:], out[:]  # other objects at the same addresses
    dispatcher.run(view, layer=0, out=out_view)
    assert (len(device.runs), len(device.alone), len(device.again)) == (2, 4, 3)
    kept = dispatcher.run(q, layer=0)  # an out of its own
    assert kept.data_ptr() != out.data_ptr()
    assert len(device.alone) == 5
    counters = dispatcher.counters.to_dict()
    assert counters["runs"] == 10
    assert counters["replays_by_mode"] == {"eager": 6, "graph": 4}
    assert sum(counters["replays"].values()) == 10


def test_a_lone_kernel_is_checked_like_any_other(dispatcher: Dispatcher, device: Device) -> None:
    device.lone = True
    plan(dispatcher, MIXED)
    q, out = tensors()
    dispatcher.run(q, layer=0, out=out)
    before = len(device.runs), len(device.alone), len(device.again)
    for bad, message in (((q[:3], out), "q: got 3 rows"), ((q, q), "out: got memory that q lies in")):
        with pytest.raises(BatchError, match=message):
            dispatcher.run(bad[0], layer=0, out=bad[1])
    for layer in ("0", 0.0, [0], 7):
        with pytest.raises(BatchError, match="layer: got"):
            dispatcher.run(q, layer=layer, out=out)  # type: ignore[arg-type]
    assert before == (len(device.runs), len(device.alone), len(device.again))


def test_each_thread_makes_the_context_its_own(dispatcher: Dispatcher, device: Device) -> None:
    plan(dispatcher, MIXED)
    plan(dispatcher, MIXED)
    q, out = tensors()
    dispatcher.run(q, layer=0, out=out)
    assert len(device.entered) == 1
    for number in range(2, 6):
        thread = threading.Thread(target=lambda: dispatcher.run(q, layer=0, out=out))
        thread.start()
        thread.join()
        assert len(device.entered) == number, "also where a thread has the number of one that is gone"
    assert len(device.runs) + len(device.again) == 5


@pytest.mark.parametrize("name", ["check", "prewarm", "dedicate", "reset", "forget_captures", "close"])
def test_whatever_is_called_while_another_thread_runs_is_refused(
    dispatcher: Dispatcher, device: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(dispatcher, MIXED)
    q, out = tensors()
    inside, go_on = threading.Event(), threading.Event()
    run = device.run

    def slow(*arguments: Any) -> tuple[str, Repeat | None]:
        inside.set()
        go_on.wait(10)
        return run(*arguments)

    monkeypatch.setattr(device, "run", slow)
    thread = threading.Thread(target=lambda: dispatcher.run(q, layer=0, out=out))
    thread.start()
    inside.wait(10)
    with pytest.raises(PodgraphError, match="in use in another thread"):
        getattr(dispatcher, name)()
    go_on.set()
    thread.join()
    assert len(device.runs) == 1
    dispatcher.run(q, layer=0, out=out)


def test_the_bodys_own_error_is_not_hidden_by_close(
    dispatcher: Dispatcher, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise CudaError("cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(device, "close", fail)
    with pytest.raises(KeyError), dispatcher:
        raise KeyError("the body's")
    with pytest.raises(PodgraphError, match="closed"):
        dispatcher.check()


@pytest.mark.parametrize("eager", [False, True])
def test_what_cannot_be_captured_leaves_the_plan_and_the_buckets(
    dispatcher: Dispatcher, device: Device, eager: bool
) -> None:
    q, out = tensors()
    first, second = dispatcher._records[0].bucket, dispatcher._records[2].bucket
    plan(dispatcher, SMALL, first)
    device.is_captured = True
    with pytest.raises(PodgraphError, match="host metadata cannot be planned while the stream captures"):
        plan(dispatcher, SMALL, second)
    dispatcher.run(q, layer=0, out=out, eager=eager)
    device.is_captured = False
    assert device.runs[-1][0] == 0, "the plan before was kept"
    with pytest.raises(BucketMiss, match="captured launches of this dispatcher belong to another template"):
        plan(dispatcher, SMALL, second)
    dispatcher.forget_captures()
    plan(dispatcher, SMALL, second)
    dispatcher.run(q, layer=0, out=out)


def test_a_run_that_failed_is_not_run_again(
    dispatcher: Dispatcher, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph may hold anything by now."""

    def fail(*arguments: Any) -> tuple[str, Repeat | None]:
        raise CudaError("cuGraphExecKernelNodeSetParams: CUDA_ERROR_INVALID_VALUE")

    plan(dispatcher, MIXED)
    (q, out), other = tensors(), tensors()
    for _ in range(2):
        dispatcher.run(q, layer=0, out=out)
    assert len(device.again) == 1
    with monkeypatch.context() as patch:
        patch.setattr(device, "run", fail)
        with pytest.raises(CudaError):
            dispatcher.run(other[0], layer=0, out=other[1])
    plan(dispatcher, MIXED)
    dispatcher.run(q, layer=0, out=out)
    assert (len(device.runs), len(device.again)) == (2, 1)


def test_nothing_is_enqueued_into_a_capture_that_cannot_hold_it(dispatcher: Dispatcher, device: Device) -> None:
    cut = Batch.of(range(10), range(10), range(9), [3] * 9, page_size=16, max_kv_len=800)
    q, out = tensors(9)
    plan(dispatcher, cut)
    device.is_captured = True
    with pytest.raises(PodgraphError, match="a batch that was split cannot be captured"):
        dispatcher.run(q, layer=0, out=out)
    device.is_captured = False
    plan(dispatcher, SMALL)
    device.is_captured = True
    dispatcher._captured = 2  # template of a capture before
    with pytest.raises(PodgraphError, match="another template of this dispatcher was captured before"):
        dispatcher.run(q, layer=0, out=out)
    dispatcher._plan_capture = 1  # the plan is in this capture too: nothing else reaches its launches
    assert device.runs == []
    dispatcher.run(q, layer=0, out=out)
    assert len(device.runs) == 1


def test_records_of_another_catalog_are_refused(dispatcher: Dispatcher) -> None:
    mine = dispatcher._records[0]
    for other in (replace(mine, spec="another"), replace(mine, bucket=Bucket(5, 16, 2)), replace(mine, template=9), 3):
        for method in (dispatcher.prewarm, dispatcher.dedicate):
            with pytest.raises(BatchError, match=r"records: got .*, allowed: those of specification tiny"):
                method([mine, other])  # type: ignore[list-item]
        with pytest.raises(BatchError, match="records: got"):
            dispatcher.plan_into(other, SMALL)  # type: ignore[arg-type]


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
