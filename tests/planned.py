"""Random specifications, buckets and batches for the planner's kernels, and what the numpy planner makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from podgraph.batch import Batch
from podgraph.planner import Layout, Policy, plan
from podgraph.planner.policy import PARTITIONS, SM90, SM90_SETTINGS
from podgraph.shapes import AttentionSpec, Bucket

POISON = -(1 << 30)
ADDRESSES = ("kv_indices_at", "bad_page")  # not made by the numpy planner
SIZES = (0, 1, 2, 5, 33, 64, 100, 300, 1100, 2048)


@dataclass(frozen=True)
class Planned:
    """A batch that a bucket holds, and how it is computed."""

    spec: AttentionSpec
    bucket: Bucket
    policy: Policy
    variant: str
    batch: Batch

    @property
    def layout(self) -> Layout:
        return Layout.of(self.spec, [self.bucket], self.policy)

    def expected(self) -> dict[str, npt.NDArray[np.int32]]:
        """Every array as the numpy planner leaves it, `POISON` where it writes nothing."""
        step = np.full(self.layout.step_bytes // 4, POISON, np.int32)
        plan(self.batch, self.bucket, self.spec, self.policy, self.variant).pack(self.layout, step)
        return self.layout.views(step)


def make_batch(qo: npt.NDArray[np.int64], kv: npt.NDArray[np.int64], page_size: int) -> Batch:
    pages = -(-kv // page_size)
    return Batch.of(
        np.concatenate([[0], np.cumsum(qo)]),
        np.concatenate([[0], np.cumsum(pages)]),
        np.zeros(int(pages.sum()), np.int32),
        np.where(kv > 0, (kv - 1) % page_size + 1, 0),
        page_size=page_size,
        max_kv_len=1 << 24,
    )


def random_case(rng: np.random.Generator, most_requests: int = 2048) -> Planned:
    """Any specification, policy and setting; a bucket that is exact, larger, or short of decode slots."""
    heads, group, page_size = (
        int(rng.choice([1, 2, 3, 4, 8, 16, 32])),
        int(rng.integers(1, 17)),
        int(rng.choice([1, 8, 16, 32, 64, 128])),
    )
    kernels = rng.choice(["sm90", "flashinfer"])
    decode_rows = min(int(rng.choice([1, 1, 2, 4, 16])), 16 // group)
    spec = AttentionSpec(
        heads * group,
        heads,
        128,
        page_size,
        window_left=int(rng.choice([-1, -1, 0, 100, 5000])),
        decode_rows=decode_rows,
    )
    policy = Policy.for_sms(int(rng.choice([0, 78, 132])), kernels, PARTITIONS[int(rng.integers(2))])
    n = int(rng.choice([size for size in SIZES if size <= most_requests]))
    prefills = rng.random(n) < rng.choice([0, 0.1, 0.5, 1])
    qo = np.where(prefills, rng.integers(0, int(rng.choice([3, 50, 400])) + 1, n), rng.integers(1, decode_rows + 1, n))
    kv = np.exp(rng.normal(rng.choice([3, 6, 8]), 1.2, n)).astype(np.int64)
    kind = rng.integers(3)
    if n and kind == 0:  # one long request among short ones
        kv[rng.integers(n)] = 100_000
    if kind == 1:
        kv = np.full(n, int(rng.integers(1, 9000)))
    batch = make_batch(qo, np.where(rng.random(n) < 0.1, 0, np.maximum(kv, qo)), page_size)
    demand = batch.demand(spec)
    decode_count = max(0, demand.decodes - int(rng.integers(0, 3)))
    overflow = demand.decodes - decode_count
    slots, rows = demand.prefills + overflow + demand.idle, demand.prefill_rows + demand.rows_of(overflow)
    spare = int(rng.integers(0, 4))
    bucket = Bucket(max(1, decode_count + slots + spare), rows + int(rng.integers(0, 50)) if slots else 0, decode_count)
    if bucket.unreachable:
        bucket = Bucket(decode_count + slots + 1, max(1, rows), decode_count)
    variant = SM90 + str(rng.choice(list(SM90_SETTINGS))) if kernels == "sm90" else "pod"
    return Planned(spec, bucket, policy, variant, batch)


def difference(want: dict[str, npt.NDArray[np.int32]], got: dict[str, npt.NDArray[np.int32]]) -> str:
    """Where two plans differ, empty where they do not."""
    for name, array in want.items():
        if name not in ADDRESSES and not np.array_equal(array, got[name]):
            where = np.flatnonzero(array != got[name])[:8]
            return f"{name}{where.tolist()}: {array[where].tolist()}, not {got[name][where].tolist()}"
    return ""
