"""How prefill and decode share a round of the grid."""

from __future__ import annotations

import emulated
import numpy as np
import planned
import pytest
import ragged
from hypothesis import given
from hypothesis import strategies as st

from podgraph.planner import UNSPLIT, Capacity, Policy, WorkList, plan
from podgraph.planner.policy import DECODE_LEAST_CHUNK, LEVELS, PARTITIONS, Partition
from podgraph.shapes import AttentionSpec, Bucket

SPEC = AttentionSpec(32, 8, 128, 16)
SIDES = st.tuples(st.integers(0, 5000), st.integers(0, 5000))


@given(tiles=SIDES, load=SIDES, sms=st.sampled_from([0, 78, 132]), partition=st.sampled_from(PARTITIONS))
def test_no_side_gets_more_than_a_round_or_less_than_an_item(
    tiles: tuple[int, int], load: tuple[int, int], sms: int, partition: Partition
) -> None:
    policy = Policy.for_sms(sms, partition=partition)
    for share in policy.shares(SPEC, tiles, load):
        assert 1 <= share <= policy.round_items(SPEC)


def test_by_kv_load() -> None:
    policy = Policy.for_sms(132, partition="kv_load")  # 264 CTAs, 33 items for 8 KV heads
    assert policy.shares(SPEC, (4, 4), (100, 100)) == (16, 16)
    assert policy.shares(SPEC, (4, 4), (300, 100)) == (24, 8)
    assert policy.shares(SPEC, (4, 4), (100, 0)) == (33, 1)
    assert policy.shares(SPEC, (0, 4), (0, 7)) == (1, 33)
    assert policy.shares(SPEC, (0, 0), (0, 0)) == (1, 1)


def test_by_tiles() -> None:
    policy = Policy.for_sms(132)
    assert policy.shares(SPEC, (4, 20), (1, 1)) == (16, 29)
    assert policy.shares(SPEC, (0, 4), (0, 1)) == (29, 33)
    assert policy.shares(SPEC, (100, 100), (1, 1)) == (16, 16)


def test_a_partition_decides_who_is_split() -> None:
    """A long prefill beside short decodes: by KV load the prefill gets nearly all of the round."""
    bucket = Bucket(9, 128, 8)
    batch = planned.make_batch(np.array([64] + [1] * 8), np.array([40_000] + [200] * 8), 16)
    items = {}
    for partition in PARTITIONS:
        work = plan(batch, bucket, SPEC, Policy.for_sms(132, partition=partition))
        items[partition] = len(work.prefill.request_indices), len(work.decode.request_indices)
    assert items["kv_load"][0] > items["tiles"][0] >= 16
    assert items["kv_load"][1] == 8, "decodes stay whole"


@pytest.mark.parametrize("partition", PARTITIONS)
@given(data=st.data())
def test_every_batch_fits_its_lists(partition: Partition, data: st.DataObject) -> None:
    case = data.draw(ragged.cases())
    policy = Policy(case.policy.ctas, "flashinfer", partition)
    work = plan(case.batch, case.bucket, case.spec, policy)
    capacity = Capacity.of(case.bucket, case.spec, policy)
    assert len(work.prefill.request_indices) <= capacity.prefill_items
    assert len(work.decode.request_indices) <= capacity.decode_items
    rows = np.diff(case.batch.qo_indptr)[work.kv_chunk_size < UNSPLIT]
    assert len(work.merge_rows) == rows.sum() <= capacity.merge_rows


def decode_chunks(prefills: list[tuple[int, int]], decodes: list[int], ctas: int = 264) -> list[int]:
    """Tokens of a part of each decode beside prefills of (rows, KV); 0 for those that stay whole."""
    qo = np.array([rows for rows, _ in prefills] + [1] * len(decodes))
    kv = np.array([kv for _, kv in prefills] + decodes)
    bucket = Bucket(len(qo), sum(rows for rows, _ in prefills), len(decodes))
    work = plan(planned.make_batch(qo, kv, 16), bucket, SPEC, Policy(ctas))
    assert isinstance(work, WorkList)
    return np.where(work.kv_chunk_size == UNSPLIT, 0, work.kv_chunk_size)[len(prefills) :].tolist()


@pytest.mark.parametrize(
    ("prefills", "decodes"),
    [
        ([(512, 8192)], [8192] * 64),
        ([(512, 4096)], [4096] * 32),
        ([(1024, 12288)], [12288] * 80),
        ([], [8192] * 34),  # 272 equal items for 264 CTAs
    ],
)
def test_decodes_that_leave_a_tail_are_split_further(prefills: list[tuple[int, int]], decodes: list[int]) -> None:
    assert all(DECODE_LEAST_CHUNK <= chunk < decodes[0] for chunk in decode_chunks(prefills, decodes))


@pytest.mark.parametrize(
    ("prefills", "decodes"),
    [
        ([], [8192] * 33),  # one round, exactly
        ([(4096, 4096)], [4096] * 32),  # prefill is longer: decodes are done before it
        ([(256, 1024)], [1024] * 16),  # too short
        ([], [4096] * 512),  # many rounds: the tail is a small part
    ],
)
def test_decodes_that_leave_none_stay_whole(prefills: list[tuple[int, int]], decodes: list[int]) -> None:
    assert not any(decode_chunks(prefills, decodes))


def test_one_long_decode_among_many_short_ones_is_split_alone() -> None:
    chunks = decode_chunks([], [100_000] + [1000] * 63)
    assert 0 < chunks[0] <= 10_000
    assert not any(chunks[1:])


@given(
    count=st.integers(1, 4000),
    longest=st.integers(1, 1000),
    ctas=st.integers(1, 300),
    heads=st.sampled_from([1, 8, 32]),
)
def test_equal_decodes_alone_take_their_rounds_at_most(count: int, longest: int, ctas: int, heads: int) -> None:
    counts, sums = [0] * (LEVELS - 1) + [count], [0] * (LEVELS - 1) + [count * longest]
    time = Policy(ctas).decode_time(AttentionSpec(heads, heads, 128, 16), (0, 0), counts, sums, longest, 1)
    rounds = -(-count * heads // ctas)
    assert 128 * count * heads * longest // ctas <= time <= 128 * rounds * longest


@pytest.mark.skipif(emulated.CXX is None, reason="no C++ compiler")
@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_kernel_takes_the_same_chunks(partition: Partition) -> None:
    """Batches whose decodes are long: where the estimate decides."""
    rng = np.random.default_rng(11)
    finer = 0
    for _ in range(40):
        heads = int(rng.choice([1, 2, 8, 32]))
        decode_rows = int(rng.choice([1, 1, 2]))
        window = int(rng.choice([-1, -1, 6000]))
        spec = AttentionSpec(4 * heads, heads, 128, 64, window_left=window, decode_rows=decode_rows)
        policy = Policy.for_sms(int(rng.choice([78, 132])), partition=partition)
        prefills, decodes = int(rng.integers(0, 3)), int(rng.choice([3, 9, 34, 65, 200]))
        qo = np.concatenate([rng.integers(20, 600, prefills), rng.integers(1, decode_rows + 1, decodes)])
        length = np.exp(rng.normal(8.5, rng.choice([0, 0.5, 1.2]), len(qo))).astype(np.int64)
        batch = planned.make_batch(qo, qo + length, 64)
        bucket = Bucket(len(qo), int(qo[:prefills].sum()), decodes)
        case = planned.Planned(spec, bucket, policy, "pod", batch)
        threads = int(rng.choice([256, 512, 1024]))
        step, status, _ = emulated.plan(batch, bucket, spec, policy, "pod", case.layout, threads=threads)
        assert status == [0] * 4
        want = case.expected()
        assert not planned.difference(want, case.layout.views(step)), case
        finer += int(want["counts"][2]) > max(decodes, policy.round_items(spec))
    assert finer >= 5, "too few of them are split beyond one round"
