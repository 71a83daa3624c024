"""podgraph beside FlashInfer's own wrappers, on the same batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from podgraph import samples
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.providers.flashinfer import EagerReference

flashinfer = pytest.importorskip("flashinfer")
CUDA = torch.device("cuda", 0)


def test_error_is_at_most_twice_flashinfers(catalog: OpenCatalog) -> None:
    with catalog.bind() as dispatcher:
        eager = EagerReference(dispatcher.spec, CUDA)
        for record in catalog.content.records:
            for name, batch in samples.sample_batches(record.bucket, dispatcher.spec, 4096, 4096, 11).items():
                inputs = samples.make_inputs(batch, dispatcher.spec, CUDA, 11)
                want, _ = samples.reference(batch, dispatcher.spec, inputs)
                theirs = samples.relative_error(eager.run(batch, inputs.q, inputs.k, inputs.v), want)
                dispatcher.plan_into(record, batch)
                ours = samples.relative_error(dispatcher.run(inputs.q, (inputs.k, inputs.v)), want)
                assert ours <= 2 * theirs, (record.bucket, name)


def test_batch_pod_wrapper_agrees(catalog: OpenCatalog) -> None:
    """FlashInfer's own fused kernel, which wants the batch split in two, against one uniform batch of ours."""
    with catalog.bind() as dispatcher:
        spec = dispatcher.spec
        prefill_kv, decode_kv, rows = [900, 400], [1000, 17, 3000, 16], [100, 60]
        pages = [-(-n // 16) for n in (*prefill_kv, *decode_kv)]
        indices = np.random.default_rng(0).permutation(sum(pages)).astype(np.int32)
        kv_indptr = np.cumsum([0, *pages]).astype(np.int32)
        last = np.array([(n - 1) % 16 + 1 for n in (*prefill_kv, *decode_kv)], np.int32)
        qo_indptr = np.cumsum([0, *rows, 1, 1, 1, 1]).astype(np.int32)
        dispatcher.plan(qo_indptr, kv_indptr, indices, last)
        q = torch.randn(int(qo_indptr[-1]), spec.num_qo_heads, 128, device=CUDA).bfloat16()
        cache = torch.randn(sum(pages), 2, 16, spec.num_kv_heads, 128, device=CUDA).bfloat16()
        ours = dispatcher.run(q, cache)

        def tensor(x):
            return torch.from_numpy(np.ascontiguousarray(x, np.int32)).to(CUDA)

        wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=CUDA), "NHD"
        )
        wrapper.plan(
            tensor(qo_indptr[:3]),
            tensor(kv_indptr[:3]),
            tensor(indices[: kv_indptr[2]]),
            tensor(last[:2]),
            tensor(np.arange(5)),
            tensor(kv_indptr[2:] - kv_indptr[2]),
            tensor(indices[kv_indptr[2] :]),
            tensor(last[2:]),
            spec.num_qo_heads,
            spec.num_kv_heads,
            128,
            16,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        pair = (cache[:, 0], cache[:, 1])
        theirs = torch.cat(wrapper.run(q[: sum(rows)], pair, q[sum(rows) :], pair, causal_p=True))
        assert samples.relative_error(ours, theirs.float()) < 6e-3
