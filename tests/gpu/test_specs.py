"""Every kind of specification that the kernels serve, each in a catalog of its own making."""

from __future__ import annotations

import math
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from podgraph import samples
from podgraph.batch import Batch
from podgraph.buckets import BucketSpace
from podgraph.build import build
from podgraph.config import BuildSpec, Workspace
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.dispatch.runtime import open as open_catalog
from podgraph.planner import preferred_setting
from podgraph.planner.policy import SM90
from podgraph.shapes import AttentionSpec, Bucket
from tests.gpu.conftest import KERNELS

CUDA = torch.device("cuda", 0)
BUCKETS = (Bucket(9, 300, 6), Bucket(6, 0, 6), Bucket(3, 300, 0), Bucket(2, 4, 0))

SPECS = {
    "head_dim 64, page_size 1": AttentionSpec(8, 2, 64, 1),
    "head_dim 256, HND": AttentionSpec(8, 4, 256, 16, kv_layout="HND"),
    "float16, window": AttentionSpec(8, 2, 128, 16, dtype="float16", window_left=100),
    "no window but one page": AttentionSpec(8, 2, 128, 16, window_left=0),
    "soft cap, page_size 7": AttentionSpec(8, 2, 128, 7, logits_soft_cap=30.0),
    "speculative decoding, window": AttentionSpec(8, 2, 128, 64, decode_rows=4, window_left=50),
    "group 4, 2 rows": AttentionSpec(32, 8, 128, 16, decode_rows=2),
    "group 8, 2 rows, page_size 64": AttentionSpec(16, 2, 128, 64, decode_rows=2),
    "group 1, 4 rows, window": AttentionSpec(4, 4, 128, 16, dtype="float16", decode_rows=4, window_left=100),
    "group 1, 8 rows, head_dim 64": AttentionSpec(4, 4, 64, 32, decode_rows=8),
    "group 1, 16 rows, window": AttentionSpec(2, 2, 128, 128, decode_rows=16, window_left=63),
    "group 2, 4 rows, long window": AttentionSpec(4, 2, 128, 16, decode_rows=4, window_left=3000),
    "group 3, 5 rows, HND": AttentionSpec(6, 2, 128, 16, kv_layout="HND", decode_rows=5),
    "group 3, 2 rows, soft cap": AttentionSpec(6, 2, 128, 64, decode_rows=2, logits_soft_cap=30.0),
    "group 7, 2 rows, head_dim 64, window": AttentionSpec(14, 2, 64, 64, decode_rows=2, window_left=0),
    "group 4, 4 rows, head_dim 64": AttentionSpec(8, 2, 64, 16, decode_rows=4),
    "several rows, page_size 8": AttentionSpec(8, 2, 128, 8, decode_rows=2),
    "group 7, HND": AttentionSpec(14, 2, 128, 16, kv_layout="HND"),
    "group 12": AttentionSpec(12, 1, 128, 16),
    "group 16": AttentionSpec(16, 1, 128, 32),
    "group 16, 2 KV heads": AttentionSpec(32, 2, 128, 16),
    "group 16, head_dim 64, HND, window": AttentionSpec(
        16, 1, 64, 64, dtype="float16", kv_layout="HND", window_left=100
    ),
    "group 16, soft cap, page_size 128": AttentionSpec(16, 1, 128, 128, logits_soft_cap=30.0),
    "group 1": AttentionSpec(4, 4, 64, 16, sm_scale=0.2),
    "group 8, page_size 64": AttentionSpec(64, 8, 128, 64),
    "group 5, page_size 32, HND": AttentionSpec(20, 4, 128, 32, kv_layout="HND", dtype="float16"),
    "group 6, page_size 128": AttentionSpec(12, 2, 64, 128),
    "soft cap, window": AttentionSpec(16, 8, 128, 16, logits_soft_cap=30.0, window_left=130),
    "soft cap, head_dim 64": AttentionSpec(8, 2, 64, 64, logits_soft_cap=50.0),
    "fp8 cache": AttentionSpec(8, 2, 128, 16, kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=2.0),
    "fp8 cache, head_dim 64": AttentionSpec(8, 2, 64, 16, dtype="float16", kv_dtype="float8_e4m3fn"),
    "fp8 cache, head_dim 256": AttentionSpec(8, 2, 256, 16, kv_dtype="float8_e4m3fn", v_scale=0.25),
}


def all_specs() -> BuildSpec:
    return BuildSpec(
        specs=MappingProxyType(SPECS),
        space=BucketSpace((2, 3, 6, 9), (0, 4, 300), (0, 6)),
        buckets=BUCKETS,
        dropped=MappingProxyType({}),
        workspace=Workspace(20_000, 20_000),
        backend="cuda",
        source="test",
    )


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> OpenCatalog:
    """One catalog of all specifications; building it verifies every bucket in a fresh process."""
    path = Path(tmp_path_factory.mktemp("specs")) / "specs.podcat"
    build(all_specs(), path, kernels=KERNELS)
    return open_catalog(path)


@pytest.mark.parametrize("name", SPECS)
def test_random_batches(many: OpenCatalog, name: str) -> None:
    with many.bind(name) as dispatcher:
        for record in many.content.buckets(name):
            for seed in range(100, 106):
                for batch in samples.sample_batches(record.bucket, dispatcher.spec, 1500, 20_000, seed).values():
                    inputs = samples.make_inputs(batch, dispatcher.spec, CUDA, seed)
                    want, want_lse = samples.reference(batch, dispatcher.spec, inputs)
                    rounded, _ = samples.reference(batch, dispatcher.spec, inputs, round_to=inputs.q.dtype)
                    dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
                    out = torch.full_like(inputs.q, math.nan)
                    lse = torch.empty(out.shape[:2], device=CUDA)
                    dispatcher.run(inputs.q, (inputs.k, inputs.v), out, lse)
                    allowed = 2 * samples.relative_error(rounded, want) + 1e-6
                    assert samples.relative_error(out, want) <= allowed, (record.bucket, seed)
                    finite = torch.isfinite(want_lse)
                    assert torch.equal(torch.isfinite(lse), finite)
                    assert not finite.any() or (lse - want_lse)[finite].abs().max() < 0.02


def test_two_specs_bound_at_once_do_not_meet(many: OpenCatalog) -> None:
    """A hybrid model alternates two specifications; each keeps its plan while the other runs."""
    names = "float16, window", "group 7, HND"
    first, second = (many.bind(n) for n in names)
    batches = []
    for dispatcher in (first, second):
        batch = samples.sample_batches(BUCKETS[0], dispatcher.spec, 900, 20_000, 1)["full"]
        dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
        batches.append((dispatcher, batch, samples.make_inputs(batch, dispatcher.spec, CUDA, 2)))
    for _ in range(3):
        for dispatcher, batch, inputs in batches:
            out = dispatcher.run(inputs.q, (inputs.k, inputs.v))
            want, _ = samples.reference(batch, dispatcher.spec, inputs)
            assert samples.relative_error(out, want) < 6e-3
    first.close()
    second.close()


def test_a_batch_is_put_into_the_setting_made_for_it(many: OpenCatalog) -> None:
    """The bucket's record names one setting, the batch may take another; results are right in both."""
    name = "group 8, page_size 64"
    with many.bind(name) as dispatcher:
        there = many.content.settings(name)
        for qo_lens, kv_len in (([300], 9000), ([1] * 6, 15_000), ([20, 1, 1], 60)):
            batch = ragged_batch(qo_lens, kv_len, dispatcher.spec)
            inputs = samples.make_inputs(batch, dispatcher.spec, CUDA, 3)
            records = dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
            wanted = SM90 + preferred_setting(batch, dispatcher.spec)
            if wanted in there:
                assert [(r.variant, r.template) for r in records] == [(wanted, there[wanted])]
            out = dispatcher.run(inputs.q, (inputs.k, inputs.v), torch.full_like(inputs.q, math.nan))
            want, _ = samples.reference(batch, dispatcher.spec, inputs)
            assert samples.relative_error(out, want) < 6e-3


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.decode_rows > 1])
def test_rows_of_a_decode_see_what_they_should_at_every_edge(many: OpenCatalog, name: str) -> None:
    """KV that ends just behind a chunk or a part, none at all, fewer rows than may be; and the same bits every time."""
    with many.bind(name) as dispatcher:
        spec = dispatcher.spec
        most = spec.decode_rows
        for more in (0, 1, 2, most - 1, most, most + 1, 63):
            for qo_lens in ([most] * 6, [most, most - 1, 1, most, most, 2]):
                kv_lens = [9024 + more, 64 + more, 128 + more, 0, most, 640 + more]  # the first one in parts
                batch = batch_of(qo_lens, [max(n, q) if n else 0 for n, q in zip(kv_lens, qo_lens, strict=True)], spec)
                inputs = samples.make_inputs(batch, spec, CUDA, more)
                want, want_lse = samples.reference(batch, spec, inputs)
                rounded, _ = samples.reference(batch, spec, inputs, round_to=inputs.q.dtype)
                dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
                results = []
                for _ in range(3):
                    out = torch.full_like(inputs.q, math.nan)
                    lse = torch.full(out.shape[:2], math.nan, device=CUDA)
                    dispatcher.run(inputs.q, (inputs.k, inputs.v), out, lse)
                    results.append((out, lse))
                out, lse = results[0]
                for again, lse_again in results[1:]:
                    assert torch.equal(out, again)
                    assert torch.equal(lse, lse_again)
                assert samples.relative_error(out, want) <= 2 * samples.relative_error(rounded, want) + 1e-6
                finite = torch.isfinite(want_lse)
                assert torch.equal(lse[~finite], want_lse[~finite])
                assert (lse - want_lse)[finite].abs().max() < 0.02


def ragged_batch(qo_lens: list[int], kv_len: int, spec: AttentionSpec) -> Batch:
    return batch_of(qo_lens, [kv_len] * len(qo_lens), spec)


def batch_of(qo_lens: list[int], kv_lens: list[int], spec: AttentionSpec) -> Batch:
    kv_len = np.array(kv_lens)
    pages = -(-kv_len // spec.page_size)
    last = np.where(kv_len > 0, (kv_len - 1) % spec.page_size + 1, 0)
    qo, kv = np.cumsum([0, *qo_lens]), np.cumsum([0, *pages])
    return Batch.of(qo, kv, np.arange(pages.sum()), last, page_size=spec.page_size, max_kv_len=20_000)
