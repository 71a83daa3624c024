"""The planner's kernels, compiled for the CPU and run thread by thread (tests/emulator/).

Every buffer that a kernel is given, shared memory among them, is exactly as long as on a GPU and lies between guards.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from podgraph.batch import Batch
from podgraph.planner import Layout, Policy
from podgraph.planner.args import PlanArgs, bucket_scalars, fill_plan, plan_threads
from podgraph.shapes import AttentionSpec, Bucket

EMULATOR = Path(__file__).parent / "emulator"
KERNELS = Path(__file__).parent.parent / "kernels"
SHARED_ARRAY = "extern __shared__ __align__(16) int arrays[];"
# in its place: memory that the caller brings
BROUGHT_ARRAY = ('extern "C" { int* arrays_brought; }', "int* const arrays = arrays_brought;")
BYTES_PER_REQUEST = "podgraph_smem_bytes_per_request"
CXX = shutil.which("g++")
POISON = -(1 << 30)
GUARD, GUARD_INTS = 0x6A7D3E15, 1024  # a page of them on either side
ACCEPTED = [0, 0, 0, 0]

Int32 = npt.NDArray[np.int32]


class Guarded:
    """Buffers of int32 on 16 bytes, each between two guards."""

    def __init__(self) -> None:
        self._whole: dict[str, Int32] = {}
        self.buffers: dict[str, Int32] = {}

    def add(self, name: str, values: npt.ArrayLike) -> Int32:
        """A copy of the values, between guards."""
        values = np.asarray(values, np.int32)
        whole = np.full(len(values) + 2 * GUARD_INTS + 3, GUARD, np.int32)
        whole = whole[(-whole.ctypes.data % 16) // 4 :]
        self._whole[name], self.buffers[name] = whole, whole[GUARD_INTS : GUARD_INTS + len(values)]
        self.buffers[name][:] = values
        return self.buffers[name]

    def address(self, name: str) -> int:
        return int(self._whole[name].ctypes.data) + 4 * GUARD_INTS

    def check(self) -> None:
        for name, whole in self._whole.items():
            behind = GUARD_INTS + len(self.buffers[name])
            for part in (whole[:GUARD_INTS], whole[behind:]):
                assert (part == GUARD).all(), f"{name}: written out of bounds"


@functools.cache
def _library(kernel: str) -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp())
    source = (KERNELS / f"{kernel}.cu").read_text()
    if SHARED_ARRAY in source:  # a declaration that no C++ compiler takes as it is
        source = f"{BROUGHT_ARRAY[0]}\n" + source.replace(SHARED_ARRAY, BROUGHT_ARRAY[1])
    (folder / "kernel.cpp").write_text(source)
    command = [
        CXX or "g++",
        "-std=c++17",
        "-O2",
        "-shared",
        "-fPIC",
        "-w",
        f"-I{KERNELS}",
        f"-I{EMULATOR}",
        f"-I{folder}",
    ]
    command += [f"-DKERNEL=podgraph_{kernel}", '-DKERNEL_SOURCE="kernel.cpp"', str(EMULATOR / "planner.cpp")]
    subprocess.run([*command, "-o", str(folder / "kernel.so")], check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


def shared_bytes(kernel: str, layout: Layout) -> int:
    """Dynamic shared memory that a catalog launches a planner with."""
    return ctypes.c_uint32.in_dll(_library(kernel), BYTES_PER_REQUEST).value * (layout.capacity.requests + 1)


def launch(kernel: str, args: PlanArgs, blocks: int, threads: int, arrays: int = 0) -> None:
    """Runs a kernel.

    Args:
        arrays: address of its dynamic shared memory.
    """
    library = _library(kernel)
    if arrays:
        ctypes.c_void_p.in_dll(library, "arrays_brought").value = arrays
    stuck = library.emulate(ctypes.byref(args), blocks, threads, 0)
    assert not stuck, f"{kernel}: its threads wait for one another for ever"


def plan(
    batch: Batch,
    bucket: Bucket,
    spec: AttentionSpec,
    policy: Policy,
    variant: str,
    layout: Layout,
    num_pages: int = 0,
    changed: Mapping[str, int] | None = None,
    threads: int = 0,
    report: Sequence[int] = ACCEPTED,
) -> tuple[Int32, list[int], int]:
    """Plans a batch, as the GPU would.

    Args:
        num_pages: pages of the cache, to check page numbers against; 0 does not.
        changed: fields of `PlanArgs`, instead of those that follow from the other arguments.
        threads: of the block; 0 is what the runtime takes.
        report: what the status is before.

    Returns:
        The packed step, the status and the address of kv_indices that kernels would read, from where they lie.

    Raises:
        AssertionError: something was written where nothing may be.
    """
    guarded = Guarded()
    arrays = {
        "qo_indptr": batch.qo_indptr,
        "kv_indptr": batch.kv_indptr,
        "kv_last_page_len": batch.kv_last_page_len,
        "kv_indices": batch.kv_indices,
    }
    for name, values in (*arrays.items(), ("status", report)):
        guarded.add(name, values)
    bases = {name: guarded.address(name) for name in guarded.buffers} | {"meta": 0, "plan": 0}
    scalars = {
        "plan_number": 0,
        "first_row": 0,
        "num_requests": batch.num_requests,
        "num_indices": len(batch.kv_indices),
        "num_pages": num_pages,
        "rows": int(batch.qo_indptr[-1]),
        "given_prefill_len": -1,
        "given_decode_count": -1,
        **bucket_scalars(spec, bucket, variant),
    }
    args = fill_plan(spec, layout, policy, (1 << 24, 1 << 24), bases, scalars)
    made = {}  # field of PlanArgs -> name of the array
    for array in layout.arrays.values():  # each apart: a list that is too long would else write into the next one
        field = f"meta_{array.name}" if array.region == "meta" else array.name
        made[field] = array.name
        guarded.add(field, np.full(array.length, -1 if field == "bad_page" else POISON))
        setattr(args, field, guarded.address(field))
    for field, value in (changed or {}).items():
        setattr(args, field, value)
    kernel = f"plan_{policy.kernels}"
    guarded.add("shared memory", np.full(shared_bytes(kernel, layout) // 4, -1))
    if args.num_pages:
        launch("check_pages", args, blocks=2, threads=64)
    launch(kernel, args, 1, threads or plan_threads(batch.num_requests), guarded.address("shared memory"))
    guarded.check()
    for name, values in arrays.items():
        assert np.array_equal(guarded.buffers[name], values), f"{name}: the caller's, and written"
    step = np.full(layout.step_bytes // 4, POISON, np.int32)
    views = layout.views(step)
    for field, name in made.items():
        views[name][:] = guarded.buffers[field]
    at = int(views["kv_indices_at"].view(np.uint64)[0]) - bases["kv_indices"]
    return step, guarded.buffers["status"].tolist(), at
