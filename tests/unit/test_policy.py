"""How prefill and decode share a round of the grid."""

from __future__ import annotations

import numpy as np
import planned
import pytest
import ragged
from hypothesis import given
from hypothesis import strategies as st

from podgraph.planner import Capacity, Policy, plan
from podgraph.planner.policy import PARTITIONS, Partition
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
