"""The planner's kernels, compiled for the CPU and run thread by thread (tests/emulator/)."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
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
BYTES_PER_REQUEST = 40
CXX = shutil.which("g++")
POISON = -(1 << 30)


@functools.cache
def _library(kernel: str) -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp())
    source = (KERNELS / f"{kernel}.cu").read_text()
    # a declaration that no C++ compiler takes as it is
    source = source.replace(SHARED_ARRAY, "int* const arrays = emulator::shared_memory.data();")
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


def launch(kernel: str, args: PlanArgs, blocks: int, threads: int) -> None:
    shared = BYTES_PER_REQUEST * (args.num_requests + 1)
    stuck = _library(kernel).emulate(ctypes.byref(args), blocks, threads, shared)
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
) -> tuple[npt.NDArray[np.int32], list[int], int]:
    """Plans a batch, as the GPU would.

    Args:
        num_pages: pages of the cache, to check page numbers against; 0 does not.
        changed: fields of `PlanArgs`, instead of those that follow from the other arguments.
        threads: of the block; 0 is what the runtime takes.

    Returns:
        The packed step, the status and the address of kv_indices that kernels would read.
    """
    step = np.full(layout.step_bytes // 4, POISON, np.int32)
    views = layout.views(step)
    views["bad_page"][:] = -1
    status = np.zeros(4 + 4, np.int32)
    status = status[(-status.ctypes.data % 16) // 4 :][:4]
    arrays = [np.ascontiguousarray(a, np.int32) for a in (batch.qo_indptr, batch.kv_indptr, batch.kv_last_page_len)]
    indices = np.ascontiguousarray(batch.kv_indices, np.int32)
    scalars = {
        "num_requests": batch.num_requests,
        "num_indices": len(indices),
        "num_pages": num_pages,
        "rows": int(batch.qo_indptr[-1]),
        "given_prefill_len": -1,
        "given_decode_count": -1,
        **bucket_scalars(spec, bucket, variant),
    }
    names = ("qo_indptr", "kv_indptr", "kv_last_page_len", "kv_indices", "status")
    bases = {name: a.ctypes.data for name, a in zip(names, (*arrays, indices, status), strict=True)}
    bases |= {"meta": step.ctypes.data, "plan": step.ctypes.data + layout.sizes["meta"]}
    args = fill_plan(spec, layout, policy, (1 << 24, 1 << 24), bases, scalars)
    for field, value in (changed or {}).items():
        setattr(args, field, value)
    if num_pages:
        launch("check_pages", args, blocks=2, threads=64)
    launch(f"plan_{policy.kernels}", args, 1, threads or plan_threads(batch.num_requests))
    return step, status.tolist(), int(views["kv_indices_at"].view(np.uint64)[0]) - indices.ctypes.data
