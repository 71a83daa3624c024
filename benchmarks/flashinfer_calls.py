"""FlashInfer's ways to compute one batch, each planned by FlashInfer's own eager planner.

Two-sided batches, eleven ways:

- ``batch_pod``: the fused batch POD;
- ``fa2_serial``, ``fa3_serial``: prefill by FA2 or FA3, then decode;
- ``fa2_branches_pd``, ``fa2_branches_dp`` and the same with fa3: prefill and decode as parallel branches of one graph,
  that of the first letter on the stream that captures;
- ``fa3_both_branches_pd``: FA3 for decode as well;
- ``fa2_unified``, ``fa3_unified``: the whole batch as one causal prefill: a single row sees all of its KV;
- ``batch_attention``: the persistent kernel.

Decode is the paged prefill wrapper on FA2: the kernel of FlashInfer's own decode on tensor cores, which one-sided
batches are also timed with by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.shapes import Case
from podgraph.shapes import AttentionSpec

WORKSPACE_BYTES = 256 << 20
POD_WORKSPACE_BYTES = 512 << 20  # half of it for each side
Outputs = tuple[torch.Tensor, ...]


class Way:
    """A call that keeps what it needs, and its latest outputs: row blocks of the result, in order.

    Called for the last time in a capture, ``outputs`` are what every replay writes.
    """

    def __init__(self, call: Callable[[], Outputs]) -> None:
        self._call = call
        self.outputs: Outputs = ()

    def __call__(self) -> None:
        self.outputs = self._call()


class FlashInferCalls:
    """The calls for one batch. Nothing is planned or allocated before a way is made.

    Two-sided ways share planned wrappers: graphs run one after the other, and within one way no two calls share one.
    """

    def __init__(self, case: Case, spec: AttentionSpec) -> None:
        self._case, self._spec = case, spec
        self._requests = len(case.qo_lens)
        self._dims = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim)
        self._pair = (case.cache[:, 0], case.cache[:, 1])
        self._planned: dict[tuple[str, int, int], Callable[[], Outputs]] = {}
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def ways(self) -> dict[str, Callable[[], Way]]:
        """How to make each way that fits the batch; making one may fail where FlashInfer's module is not there."""
        n, everything = self._case.prefills, (0, self._requests)
        if n == 0:
            return {
                "decode_fa2": lambda: Way(self._paged("fa2", *everything, causal=False)),
                "decode_fa3": lambda: Way(self._paged("fa3", *everything, causal=False)),
                "decode_tensor_cores": lambda: Way(self._decode(tensor_cores=True)),
                "decode_cuda_cores": lambda: Way(self._decode(tensor_cores=False)),
                "batch_attention": lambda: Way(self._batch_attention()),
            }
        if n == self._requests:
            return {
                "fa2": lambda: Way(self._paged("fa2", *everything, causal=True)),
                "fa3": lambda: Way(self._paged("fa3", *everything, causal=True)),
                "batch_attention": lambda: Way(self._batch_attention()),
            }
        made: dict[str, Callable[[], Way]] = {"batch_pod": lambda: Way(self._batch_pod())}
        for backend in ("fa2", "fa3"):
            made[f"{backend}_serial"] = lambda b=backend: self._serial(b)  # type: ignore[misc]
            made[f"{backend}_branches_pd"] = lambda b=backend: self._branches(b, "fa2")  # type: ignore[misc]
            made[f"{backend}_branches_dp"] = lambda b=backend: self._branches(b, "fa2", False)  # type: ignore[misc]
            made[f"{backend}_unified"] = lambda b=backend: Way(  # type: ignore[misc]
                self._paged(b, *everything, causal=True)
            )
        made["fa3_both_branches_pd"] = lambda: self._branches("fa3", "fa3")
        made["batch_attention"] = lambda: Way(self._batch_attention())
        return made

    def _sides(self, prefill: str, decode: str) -> tuple[Callable[[], Outputs], Callable[[], Outputs]]:
        n = self._case.prefills
        return self._paged(prefill, 0, n, causal=True), self._paged(decode, n, self._requests, causal=False)

    def _serial(self, backend: str) -> Way:
        prefill, decode = self._sides(backend, "fa2")
        return Way(lambda: prefill() + decode())

    def _branches(self, prefill_backend: str, decode_backend: str, prefill_leads: bool = True) -> Way:
        prefill, decode = self._sides(prefill_backend, decode_backend)

        def run() -> Outputs:
            """In a capture the waits become a fork and a join."""
            leading = torch.cuda.current_stream()
            self._side.wait_stream(leading)
            with torch.cuda.stream(self._side):
                aside = (decode if prefill_leads else prefill)()
            led = (prefill if prefill_leads else decode)()
            leading.wait_stream(self._side)
            return led + aside if prefill_leads else aside + led

        return Way(run)

    def _part(self, first: int, last: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Some of the requests as a batch of their own: FlashInfer's four arrays on the GPU, and their rows of q."""
        qo, kv, indices, page_len = self._case.arrays
        arrays = (
            qo[first : last + 1] - qo[first],
            kv[first : last + 1] - kv[first],
            indices[kv[first] : kv[last]],
            page_len[first:last],
        )
        rows = self._case.q[int(qo[first]) : int(qo[last])]
        return [torch.from_numpy(np.ascontiguousarray(a, np.int32)).cuda() for a in arrays], rows

    def _paged(self, backend: str, first: int, last: int, *, causal: bool) -> Callable[[], Outputs]:
        """The paged prefill wrapper on some of the requests."""
        key = backend, first, last
        if key not in self._planned:
            import flashinfer

            arrays, q = self._part(first, last)
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                _workspace(WORKSPACE_BYTES), self._spec.kv_layout, backend=backend
            )
            wrapper.plan(*arrays, *self._dims, self._spec.page_size, causal=causal, **_dtypes(q))
            out, pair = torch.empty_like(q), self._pair

            def run() -> Outputs:  # without self: in a circle, gigabytes would wait for the garbage collector
                wrapper.run(q, pair, out=out, enable_pdl=False)
                return (out,)

            self._planned[key] = run
        return self._planned[key]

    def _decode(self, *, tensor_cores: bool) -> Callable[[], Outputs]:
        """FlashInfer's decode wrapper on the whole batch."""
        import flashinfer

        (_, kv, indices, last), q = self._part(0, self._requests)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(WORKSPACE_BYTES), self._spec.kv_layout, use_tensor_cores=tensor_cores
        )
        wrapper.plan(kv, indices, last, *self._dims, self._spec.page_size, **_dtypes(q))
        out = torch.empty_like(q)

        def run() -> Outputs:
            wrapper.run(q, self._pair, out=out, enable_pdl=False)
            return (out,)

        return run

    def _batch_pod(self) -> Callable[[], Outputs]:
        """The fused kernel; it takes no out."""
        import flashinfer

        n = self._case.prefills
        (prefill, q_p), (decode, q_d) = self._part(0, n), self._part(n, self._requests)
        wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(_workspace(POD_WORKSPACE_BYTES), self._spec.kv_layout)
        wrapper.plan(*prefill, *decode, *self._dims, self._spec.page_size, **_dtypes(q_p))

        def run() -> Outputs:
            out_p, out_d = wrapper.run(q_p, self._pair, q_d, self._pair, causal_p=True, enable_pdl=False)
            return out_p, out_d

        return run

    def _batch_attention(self) -> Callable[[], Outputs]:
        """The persistent kernel on the whole batch; it knows no programmatic launch."""
        import flashinfer

        (qo, kv, indices, _), q = self._part(0, self._requests)
        kv_lens = torch.tensor(self._case.kv_lens, dtype=torch.int32, device="cuda")
        wrapper = flashinfer.BatchAttention(self._spec.kv_layout)
        heads, kv_heads, head_dim = self._dims
        wrapper.plan(
            qo, kv, indices, kv_lens, heads, kv_heads, head_dim, head_dim, self._spec.page_size,
            causal=True, **_dtypes(q),
        )  # fmt: skip
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")

        def run() -> Outputs:
            wrapper.run(q, self._pair, out=out, lse=lse)
            return (out,)

        return run


def _workspace(size: int) -> torch.Tensor:
    # zeros: the decode wrapper asks for them
    return torch.zeros(size, dtype=torch.uint8, device="cuda")


def _dtypes(q: torch.Tensor) -> dict[str, Any]:
    return {"q_data_type": q.dtype, "kv_data_type": q.dtype}
