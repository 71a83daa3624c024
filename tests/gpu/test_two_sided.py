"""The two-sided face on the card; its rules are tested on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import podgraph
from podgraph.batch import Batch
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.samples import Inputs, reference, relative_error


@pytest.mark.parametrize("adjacent", [True, False], ids=["slices of one tensor", "two tensors"])
def test_two_sides_are_one_batch(catalog: OpenCatalog, adjacent: bool) -> None:
    rng = np.random.default_rng(1)
    with catalog.bind() as dispatcher:
        spec, pod = dispatcher.spec, podgraph.TwoSided(dispatcher)
        qo, kv = [100, 1, 33, 1, 1, 1], [300, 40, 33, 500, 16, 17]
        pages = [-(-n // 16) for n in kv]
        indices = rng.permutation(sum(pages)).astype(np.int32)
        qo_indptr, kv_indptr = np.cumsum([0, *qo]), np.cumsum([0, *pages])
        last = np.array([(n - 1) % 16 + 1 for n in kv])
        split = int(kv_indptr[3])
        pod.plan(
            qo_indptr[:4], kv_indptr[:4], indices[:split], last[:3],
            qo_indptr[3:] - qo_indptr[3], kv_indptr[3:] - split, indices[split:], last[3:],
        )  # fmt: skip
        q = torch.randn(sum(qo), spec.num_qo_heads, spec.head_dim, device="cuda").bfloat16()
        q_p, q_d = q[:134], q[134:]
        if not adjacent:
            q_p, q_d = q_p.clone(), q_d.clone()
        cache = torch.randn(sum(pages), 2, 16, spec.num_kv_heads, spec.head_dim, device="cuda").bfloat16()
        out_p, out_d = pod.run(q_p, cache, q_d, cache)
        batch = Batch.of(qo_indptr, kv_indptr, indices, last, page_size=16, max_kv_len=1 << 20)
        want, _ = reference(batch, spec, Inputs(q, cache[:, 0], cache[:, 1]))
        assert relative_error(torch.cat([out_p, out_d]), want) < 6e-3
