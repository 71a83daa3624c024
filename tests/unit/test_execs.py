"""Executable graphs under a budget, and what the planner reports: on a driver that only remembers."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_dispatcher import MIXED, SPEC, bind, tensors_of
from test_dispatcher import plan as plan_on_cpu

from podgraph import driver
from podgraph.batch import Batch
from podgraph.catalog.model import KernelNode, Record, Slot, Template
from podgraph.dispatch.calls import CallChecker
from podgraph.dispatch.counters import Counters
from podgraph.dispatch.execs import GROWTH_BYTES, ExecPool
from podgraph.dispatch.planning import REFUSALS, Limits, Planner, Staging
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.dispatch.tensors import Cache
from podgraph.errors import BatchError, CudaError, PodgraphError
from podgraph.planner.args import PLAN, RUN, PlanArgs, bucket_scalars
from podgraph.shapes import AttentionSpec, Bucket

EXEC_BYTES = 300_000
TEMPLATE = Template(
    (KernelNode("ab" * 32, "podgraph_pod_sm90", (132, 1, 1), (512, 1, 1), 1024, bytes(RUN.size)),),
    (),
    (),
    tuple(Slot(name, 0, *place) for name, place in RUN.slots.items()),
)


class Device:
    """What the driver was asked for; device memory is taken in pieces, as the real one takes it."""

    def __init__(self) -> None:
        self.live = self.taken = 0
        self.launched: list[bytes] = []
        self.updates = 0

    def free(self) -> int:
        self.taken = max(self.taken, -(-self.live * EXEC_BYTES // GROWTH_BYTES) * GROWTH_BYTES)
        return (1 << 40) - self.taken


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()

    class Image:
        def __init__(self, cubin: bytes) -> None:
            pass

        def function(self, name: str, shared_bytes: int, params_bytes: int) -> int:
            return 1

    class Kernel:
        def __init__(self, launch: driver.Launch, params: bytearray | None = None) -> None:
            self.params = bytearray(launch.params) if params is None else params

        def enqueue(self, stream: int, threads: int = 0) -> None:
            found.launched.append(bytes(self.params))

        def launcher(self, stream: int, threads: int = 0) -> Callable[[], int]:
            return lambda: found.launched.append(bytes(self.params)) or 0

    class Graph:
        def __init__(self) -> None:
            self.params = b""

        def add_kernel(self, kernel: Kernel) -> int:
            self.params = bytes(kernel.params)
            return 0

        def instantiate(self) -> Exec:
            found.live += 1
            return Exec(self.params)

        def close(self) -> None:
            pass

    class Exec:
        def __init__(self, params: bytes) -> None:
            self.params = params

        def set_kernel(self, node: int, kernel: Kernel) -> None:
            found.updates += 1
            self.params = bytes(kernel.params)

        def launch(self, stream: int) -> None:
            found.launched.append(self.params)

        def close(self) -> None:
            found.live -= 1

    class Memory:
        addresses = itertools.count(1 << 40, 1 << 30)

        def __init__(self, size: int) -> None:
            self.size, self.address = size, next(self.addresses)

        def close(self) -> None:
            self.address = 0

    class PinnedMemory:
        def __init__(self, size: int) -> None:
            self.size, self._buffer = size, (ctypes.c_uint8 * size)()
            self.address = ctypes.addressof(self._buffer)

        def close(self) -> None:
            pass

    class Event:
        def record(self, stream: int) -> None:
            pass

        wait = close = lambda self: None

    for made in (Image, Kernel, Graph, Memory, PinnedMemory, Event):
        monkeypatch.setattr(driver, made.__name__, made)
    monkeypatch.setattr(driver, "free_memory", found.free)
    monkeypatch.setattr(driver, "is_capturing", lambda stream: False)
    return found


KEPT: list[torch.Tensor] = []  # so that no two of them get the same address


def call(lse: bool = False) -> tuple[Any, Cache]:
    q = torch.zeros(3, SPEC.num_qo_heads, SPEC.head_dim, dtype=torch.bfloat16)
    k = torch.zeros(4, 16, SPEC.num_kv_heads, SPEC.head_dim, dtype=torch.bfloat16)
    KEPT.extend([q, k, out := torch.empty_like(q)])
    KEPT.append(sums := torch.zeros(3, SPEC.num_qo_heads))
    return CallChecker(SPEC, torch.device("cpu")).check(3, q, out, sums if lse else None), Cache(SPEC, k, k)


def pool_of(device: Device, budget: int | None) -> tuple[ExecPool, Counters]:
    counters = Counters()
    images: Any = {"ab" * 32: driver.Image(b"")}
    return ExecPool([TEMPLATE] * 100, images, {}, counters, budget), counters


def test_execs_are_made_once_and_all_kept_without_a_budget(device: Device) -> None:
    pool, counters = pool_of(device, None)
    execs = [pool.get((i, layer), i) for i in range(5) for layer in range(32)]
    assert [pool.get((i, layer), i) for i in range(5) for layer in range(32)] == execs
    assert len(pool) == counters.exec_instantiations == device.live == 160
    assert counters.exec_evictions == 0
    assert pool.bytes == device.taken
    pool.close()
    assert device.live == 0


@pytest.mark.parametrize("budget", [0, 1, GROWTH_BYTES, 3 * GROWTH_BYTES, 16 << 20], ids=str)
def test_a_budget_is_kept(device: Device, budget: int) -> None:
    pool, counters = pool_of(device, budget)
    for i in np.random.default_rng(0).integers(0, 100, 500).tolist():
        pool.get((i, None), i)
        assert pool.bytes == device.taken <= max(budget, GROWTH_BYTES), "one exec is always kept"
    assert counters.exec_instantiations == counters.exec_evictions + len(pool)
    fitting = budget // GROWTH_BYTES * GROWTH_BYTES // EXEC_BYTES
    assert max(1, fitting - GROWTH_BYTES // EXEC_BYTES) <= len(pool) <= max(1, fitting)


def test_the_least_recently_used_exec_goes(device: Device) -> None:
    pool, counters = pool_of(device, 2 * GROWTH_BYTES)
    made = 0
    while not counters.exec_evictions:
        hot = pool.get((0, None), 0)
        made += 1
        pool.get((made, None), 0)
    assert pool.get((0, None), 0) is hot
    before = counters.exec_instantiations
    pool.get((1, None), 0)
    assert counters.exec_instantiations == before + 1, "1 was the one to go"


def test_nothing_is_patched_while_addresses_stay(device: Device) -> None:
    pool, _ = pool_of(device, None)
    exec_, (one, cache), (other, _) = pool.get((0, 0), 0), call(), call()
    updates = [
        exec_.replay(7, c, cache, maps) for c, maps in ((one, 5), (one, 5), (other, 5), (one, 5), (one, 6), (one, 6))
    ]
    assert updates == [1, 0, 1, 1, 1, 0]
    assert device.updates == 4
    for params, (c, maps) in zip(
        device.launched, ((one, 5), (one, 5), (other, 5), (one, 5), (one, 6), (one, 6)), strict=True
    ):
        q, k, v, out, lse, where = struct.unpack_from("<6Q", params)
        assert (q, out, lse, where) == (*c.key[:3], maps)
        assert (k, v) == cache.key[:2]
        strides = struct.unpack_from("<8I", params, RUN.offset_of("q_stride_n"))
        assert strides == (*c.key[3:], *cache.key[2:])


def test_a_graph_whose_change_failed_half_way_holds_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = pool_of(device, None)
    exec_, (one, cache), (other, _) = pool.get((0, 0), 0), call(), call()
    assert exec_.replay(7, one, cache, 5) == 1
    assert exec_.held == one.key

    def fail(node: int, kernel: Any) -> None:
        raise CudaError("cuGraphExecKernelNodeSetParams: CUDA_ERROR_INVALID_VALUE")

    with monkeypatch.context() as patch:
        patch.setattr(exec_._exec, "set_kernel", fail)
        with pytest.raises(CudaError):
            exec_.replay(7, other, cache, 5)
    assert exec_.held == ()
    assert exec_.replay(7, one, cache, 5) == 1, "set anew, whatever it held before"


def test_a_lone_kernel_is_launched_with_each_layers_own_tensors(device: Device) -> None:
    """The layers share one block of parameters: each launch sets all of them."""
    pool, _ = pool_of(device, None)
    launches, layers = pool.launches(0), [call(lse=True) for _ in range(3)]
    alone = [launches.alone(7, cache, maps) for maps, (_, cache) in enumerate(layers)]
    for layer in (0, 1, 2, 1, 0):
        launch, (made, cache) = alone[layer], layers[layer]
        assert launch is not None
        assert launch(made) == 0
        launches.set(made, cache, layer)
        assert device.launched[-1] == bytes(launches.kernels[0].params)
    pool._templates = [dataclasses.replace(TEMPLATE, nodes=TEMPLATE.nodes * 2, slots=TEMPLATE.slots + SECOND_SLOTS)]
    assert ExecPool(pool._templates, pool._images, {}, Counters(), None).launches(0).alone(7, layers[0][1], 0) is None


SECOND_SLOTS = tuple(Slot(name, 1, *place) for name, place in RUN.slots.items())


def test_a_template_without_its_slots_is_refused(device: Device) -> None:
    pool, _ = pool_of(device, None)
    bad = Template(TEMPLATE.nodes, (), (), TEMPLATE.slots[1:])
    pool._templates = [bad]
    with pytest.raises(CudaError, match="template node 0: no slot q where this podgraph has it"):
        pool.get((0, None), 0)


# --- the planner --------------------------------------------------------------------------------------------------

PLANNER = Template(
    tuple(
        KernelNode("ab" * 32, name, (1, 1, 1), (1024, 1, 1), 0, bytes(PLAN.size))
        for name in ("podgraph_check_pages", "podgraph_plan_sm90")
    ),
    (),
    (),
    (),
)
BUCKET = Bucket(6, 64, 4)
RECORD = Record("tiny", BUCKET, "pod_sm90_w64d", 0)


def planner_of(device: Device) -> Planner:
    images: Any = {"ab" * 32: driver.Image(b"")}
    return Planner(PLANNER, images, {}, AttentionSpec(8, 2, 128, 16), Limits(16, 100, 1000), Counters())


def test_a_step_is_one_launch_with_its_numbers(device: Device) -> None:
    planner = planner_of(device)
    planner.launch(7, RECORD, (11, 12, 13, 14), 5, 77, 20, prefill_len=18, decode_count=2)
    (params,) = device.launched
    args = PlanArgs.from_buffer_copy(params)
    got = {name: getattr(args, name) for name in (*PLAN.pointers[:4], *PLAN.scalars)}
    assert got == {
        "plan_number": 1, "first_row": 0,
        "qo_indptr": 11, "kv_indptr": 12, "kv_last_page_len": 13, "kv_indices": 14,
        "num_requests": 5, "num_indices": 77, "num_pages": 0, "rows": 20,
        "given_prefill_len": 18, "given_decode_count": 2,
        "batch": 6, "prefill_len": 64, "decode_count": 4, "prefill_tile": 128, "shares_tiles": 1, "splits_tiles": 1,
    }  # fmt: skip
    planner.launch(7, RECORD, (11, 12, 13, 14), 5, 77, 20, num_pages=9)
    assert len(device.launched) == 3, "the check of page numbers goes first"
    assert PlanArgs.from_buffer_copy(device.launched[-1]).num_pages == 9
    other = Record("tiny", Bucket(3, 16, 2), "pod_sm90_w64", 0)
    for number, record in enumerate((other, other, RECORD, other), 3):
        planner.launch(7, record, (11, 12, 13, 14), 2, 1 << 40, 20, first_row=number)
        args = PlanArgs.from_buffer_copy(device.launched[-1])
        assert {n: getattr(args, n) for n in PLAN.scalars[PLAN.scalars.index("batch") :]} == bucket_scalars(
            planner._spec, record.bucket, record.variant
        )
        assert (args.plan_number, args.first_row, args.num_indices) == (number, number, (1 << 31) - 1)
    planner._number = (1 << 31) - 1
    planner.launch(7, RECORD, (11, 12, 13, 14), 2, 5, 20)
    assert PlanArgs.from_buffer_copy(device.launched[-1]).plan_number == 1, "0 means none"


@pytest.mark.parametrize("code", range(1, len(REFUSALS) + 1))
def test_a_report_is_raised_once(device: Device, code: int) -> None:
    planner = planner_of(device)
    planner.raise_refusal()
    planner.report[:] = [code, 3, 17, 41]
    with pytest.raises(
        BatchError, match=r"launch 41 .* refused on the GPU, and its run\(\) computed nothing: .*, allowed: "
    ) as raised:
        planner.raise_refusal()
    assert "{" not in str(raised.value)
    assert list(planner._counters.planner_errors.values()) == [1]
    planner.raise_refusal()


def test_metadata_go_through_the_ring_in_one_copy(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[tuple[int, bytes]] = []
    monkeypatch.setattr(
        driver, "copy_to_device", lambda to, source, size, stream: copies.append((to, ctypes.string_at(source, size)))
    )
    staging = Staging(requests=6, pages=50)
    arrays = [np.array(a, np.int32) for a in ([0, 1, 3], [0, 2, 5], [4, 9], [7, 8, 9, 1, 2])]
    for _ in range(9):
        copies.clear()
        places = staging.upload(7, list(arrays), [0] * 4)
        ((to, data),) = copies
        for array, place in zip(arrays, places, strict=True):
            assert place % 16 == 0
            assert data[place - to :][: array.nbytes] == array.tobytes()
    # what lies on the GPU stays where it is
    copies.clear()
    mixed: list[Any] = [arrays[0], torch.zeros(3), arrays[2], torch.zeros(5)]
    places = staging.upload(7, mixed, [0, 999, 0, 888])
    assert (places[1], places[3]) == (999, 888)
    ((to, data),) = copies
    assert data[places[2] - to :][:8] == arrays[2].tobytes()
    with pytest.raises(BatchError, match="kv_indices: got 51 entries, allowed: at most 50"):
        staging.upload(7, [*arrays[:3], np.zeros(51, np.int32)], [0] * 4)
    staging.close()


# --- the dispatcher's own rules -----------------------------------------------------------------------------------


def test_bound_layers(device: Device) -> None:
    batch = MIXED
    tensors = [tensors_of(batch, seed) for seed in range(3)]
    catalog = bind()._catalog
    bound = OpenCatalog(Path("memory.podcat"), catalog).bind(kv_caches=[(t.k, t.v) for t in tensors])
    with bound, bind() as plain:
        plan_on_cpu(bound, batch)
        plan_on_cpu(plain, batch)
        for layer, t in enumerate(tensors):
            want = plain.run(t.q, (t.k, t.v))
            live = int(batch.qo_indptr[-1])
            assert torch.equal(bound.run(t.q, layer=layer)[:live], want[:live])
        with pytest.raises(BatchError, match="layer: got 3, allowed: one of the 3 bound kv_caches"):
            bound.run(tensors[0].q, layer=3)
        with pytest.raises(BatchError, match="got paged_kv_cache and layer"):
            bound.run(tensors[0].q, (tensors[0].k, tensors[0].v), layer=0)
        with pytest.raises(BatchError, match="got no cache"):
            bound.run(tensors[0].q)
    with pytest.raises(BatchError, match=r"kv_caches\[1\]: K cache: got shape"):
        OpenCatalog(Path("memory.podcat"), catalog).bind(
            kv_caches=[(t.k if i != 1 else t.k[:, :8], t.v) for i, t in enumerate(tensors)]
        )


def test_hints_that_contradict_the_host(device: Device) -> None:
    with bind() as dispatcher:
        arrays = MIXED.qo_indptr, MIXED.kv_indptr, MIXED.kv_indices, MIXED.kv_last_page_len
        dispatcher.plan(*arrays, prefill_len=5, decode_count=2)
        with pytest.raises(BatchError, match="prefill_len: got 4, the batch has 5"):
            dispatcher.plan(*arrays, prefill_len=4, decode_count=2)
        with pytest.raises(BatchError, match="decode_count: got 1, the batch has 2"):
            dispatcher.plan(*arrays, decode_count=1)
        assert [r.bucket for r in dispatcher.plan(*arrays, bucket=Bucket(4, 16, 2))] == [Bucket(4, 16, 2)]
        with pytest.raises(BatchError, match=r"bucket: got .*batch=5.*, allowed: one of the catalog's"):
            dispatcher.plan(*arrays, bucket=Bucket(5, 16, 2))


def test_a_second_thread_is_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with bind() as dispatcher:
        plan_on_cpu(dispatcher, MIXED)
        tensors = tensors_of(MIXED)
        inside, go_on = threading.Event(), threading.Event()
        run = dispatcher._backend.run

        def slow(*arguments: Any) -> str:
            inside.set()
            go_on.wait(10)
            return run(*arguments)

        monkeypatch.setattr(dispatcher._backend, "run", slow)
        thread = threading.Thread(target=lambda: dispatcher.run(tensors.q, (tensors.k, tensors.v)))
        thread.start()
        inside.wait(10)
        with pytest.raises(PodgraphError, match="in use in another thread"):
            plan_on_cpu(dispatcher, MIXED)
        go_on.set()
        thread.join()
        monkeypatch.undo()
        plan_on_cpu(dispatcher, MIXED)


def test_a_forked_child_is_refused(device: Device) -> None:
    with bind() as dispatcher:
        plan_on_cpu(dispatcher, MIXED)
        child = os.fork()
        if child == 0:
            try:
                plan_on_cpu(dispatcher, MIXED)
            except PodgraphError as e:
                os._exit(0 if "forked" in str(e) and "spawn" in str(e) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        plan_on_cpu(dispatcher, MIXED)


@pytest.mark.parametrize("fatal", [True, False])
def test_a_failure_of_the_gpu_is_the_end(device: Device, monkeypatch: pytest.MonkeyPatch, fatal: bool) -> None:
    with bind() as dispatcher:
        plan_on_cpu(dispatcher, MIXED)
        tensors = tensors_of(MIXED)

        def fail(*arguments: Any) -> str:
            raise CudaError("cuGraphLaunch: " + ("CUDA_ERROR_ILLEGAL_ADDRESS" if fatal else "CUDA_ERROR_OUT_OF_MEMORY"))

        monkeypatch.setattr(dispatcher._backend, "run", fail)
        with pytest.raises(CudaError, match="cuGraphLaunch"):
            dispatcher.run(tensors.q, (tensors.k, tensors.v))
        monkeypatch.undo()
        if fatal:
            with pytest.raises(PodgraphError, match="unusable since the GPU failed"):
                plan_on_cpu(dispatcher, MIXED)
        else:
            with pytest.raises(PodgraphError, match="nothing is planned"):
                dispatcher.run(tensors.q, (tensors.k, tensors.v))
            plan_on_cpu(dispatcher, MIXED)


def test_a_batch_needs_its_rows_again_after_a_larger_plan(device: Device) -> None:
    """The same tensors as last time are not checked again, but for the rows that the new plan needs."""
    with bind() as dispatcher:
        small = Batch.of([0, 1], [0, 1], [0], [3], page_size=16, max_kv_len=800)
        tensors = tensors_of(MIXED)
        q, out = tensors.q[:1].clone(), torch.empty_like(tensors.q[:1])
        plan_on_cpu(dispatcher, small)
        for _ in range(2):
            dispatcher.run(q, (tensors.k, tensors.v), out)
        plan_on_cpu(dispatcher, MIXED)
        with pytest.raises(BatchError, match="q: got 1 rows, allowed: at least the planned batch's 7"):
            dispatcher.run(q, (tensors.k, tensors.v), out)
