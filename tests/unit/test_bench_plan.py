"""What benchmarks/bench_plan.py plans: batches, catalogs and lists that it would only find wrong on a GPU otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import emulated
import numpy as np
import pytest
import torch

from benchmarks import bench_plan
from benchmarks.bench_plan import (
    CHECKS,
    CHUNK,
    COUNTS,
    PLANNED,
    bucket_of,
    check_bucket,
    even_batch,
    host_lists,
    mixed_batch,
    nine_spec,
    planner_spec,
    served_by,
    sides,
)
from benchmarks.kernel_shapes import MAIN, NINE
from podgraph import build as building
from podgraph.batch import Batch
from podgraph.catalog.model import Record
from podgraph.planner import Layout, Policy, plan, preferred_setting
from podgraph.planner.policy import SM90
from podgraph.providers import flashinfer, pod_sm90
from podgraph.providers.planner import MAX_BATCH
from podgraph.shapes import Bucket

BATCHES = [
    *((mixed_batch(n), bucket_of(n), f"{n} requests") for n in (*COUNTS, *PLANNED)),
    *((even_batch(*check), check_bucket(check[0]), name) for name, check in CHECKS.items()),
]
EACH = pytest.mark.parametrize(("batch", "bucket"), [b[:2] for b in BATCHES], ids=[b[2] for b in BATCHES])
H200 = 132


@EACH
def test_batches_fit_their_buckets(batch: Batch, bucket: Bucket) -> None:
    limits, demand = planner_spec().workspace, batch.demand(MAIN)
    assert bucket.fits(demand)
    assert bucket.family == "mixed"
    assert bucket.batch <= MAX_BATCH
    assert batch.num_pages <= limits.max_pages
    assert int(batch.kv_lens.max()) <= limits.max_kv_len
    assert sorted(batch.kv_indices.tolist()) == list(range(batch.num_pages)), "each page once"


@EACH
@pytest.mark.parametrize("kernels", ["sm90", "flashinfer"])
def test_lists_fit_the_catalog(batch: Batch, bucket: Bucket, kernels: Any) -> None:
    policy = Policy.for_sms(H200, kernels)
    layout = Layout.of(MAIN, planner_spec().buckets, policy)
    if batch.num_requests not in PLANNED:  # those take another bucket's place
        assert bucket in planner_spec().buckets
    variant = SM90 + preferred_setting(batch, MAIN) if kernels == "sm90" else ""
    work = plan(batch, bucket, MAIN, policy, variant)
    work.pack(layout, np.zeros(layout.step_bytes // 4, np.int32))


def test_batches_are_mixed_and_differ() -> None:
    batch = mixed_batch(64)
    demand = batch.demand(MAIN)
    assert (demand.prefills, demand.decodes) == (2, 62)
    assert CHUNK // 2 <= demand.prefill_rows <= 2 * CHUNK
    assert 500 < np.median(batch.kv_lens) < 2000
    assert mixed_batch(64).qo_indptr.tolist() == batch.qo_indptr.tolist(), "the same again"
    assert mixed_batch(64, 1).qo_indptr.tolist() != batch.qo_indptr.tolist()
    held = planner_spec().buckets
    for n in PLANNED:
        assert any(bucket.fits(mixed_batch(n).demand(MAIN)) for bucket in held)


def test_even_batches_name_full_pages() -> None:
    batch = even_batch(64, 256)
    assert batch.num_pages == 64 * 256
    assert set(batch.kv_lens.tolist()) == {256 * MAIN.page_size}
    assert set(batch.qo_lens.tolist()) == {1}


def test_sides_are_the_whole_batch() -> None:
    batch = mixed_batch(8)
    prefill, decode = sides(batch)
    rows = np.concatenate([np.diff(prefill[0]), np.diff(decode[0])])
    assert sorted(rows.tolist()) == sorted(batch.qo_lens.tolist())
    assert set(np.diff(decode[0]).tolist()) == {1}
    assert sorted([*prefill[2].tolist(), *decode[2].tolist()]) == sorted(batch.kv_indices.tolist())
    for qo, kv, indices, last in (prefill, decode):
        assert len(qo) == len(kv) == len(last) + 1
        assert len(indices) == kv[-1]
        part = Batch.of(qo, kv, indices, last, page_size=MAIN.page_size, max_kv_len=1 << 16)
        assert set(part.kv_lens.tolist()) <= set(batch.kv_lens.tolist())


def test_flashinfer_is_asked_for_one_kernel() -> None:
    """Each is minutes of compiler time."""
    variant = flashinfer.PodVariant(128, 16)
    assert flashinfer.reachable(MAIN, planner_spec().buckets + nine_spec().buckets) == [variant]


def test_served_by() -> None:
    assert building._kernels(MAIN, pod_sm90.ARCH) == "sm90"
    with served_by("flashinfer"):
        assert building._kernels(MAIN, pod_sm90.ARCH) == "flashinfer"
    with served_by("sm90"):
        assert building._kernels(MAIN, pod_sm90.ARCH) == "sm90"


def test_unverified_catalogs_hold_every_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: dict[str, Any] = {}

    def candidate(spec: Any, kernels: Path, device: int, progress: Any, seconds: dict[str, float]) -> Any:
        wanted["kernels"] = building._kernels(MAIN, pod_sm90.ARCH)
        return building._cpu_candidate(spec)

    monkeypatch.setattr(building, "_cuda_candidate", candidate)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bench_plan, "ROOT", tmp_path)
    catalog = bench_plan.unverified(nine_spec(), "flashinfer")
    assert wanted == {"kernels": "flashinfer"}
    assert {r.bucket for r in catalog.content.records} == {shape.bucket for shape in NINE}


@pytest.mark.skipif(emulated.CXX is None, reason="no C++ compiler")
@pytest.mark.parametrize("requests", [1, 64])
def test_host_lists_are_those_of_the_kernel(requests: int) -> None:
    """All that is read of them: what the copy puts over the kernel's lists makes no difference to the attention."""
    batch, bucket, policy = mixed_batch(requests), bucket_of(requests), Policy.for_sms(H200, "sm90")
    layout = Layout.of(MAIN, planner_spec().buckets, policy)
    record = Record("", bucket, SM90 + preferred_setting(batch, MAIN), 0)
    address = 0x7F12_3456_7890
    copied = layout.views(host_lists(batch, record, policy, layout, address))
    made, status, _ = emulated.plan(batch, bucket, MAIN, policy, record.variant, layout)
    assert status == [0] * 4
    assert copied["kv_indices_at"].view(np.uint64).tolist() == [address]
    views = layout.views(made)
    for name, array in copied.items():
        if name != "kv_indices_at":
            live = views[name] != emulated.POISON
            assert np.array_equal(views[name][live], array[live]), name
    assert copied["counts"].tolist() == views["counts"].tolist()
