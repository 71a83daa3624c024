"""The choice of a bucket, and the cutting of batches that no bucket holds."""

from __future__ import annotations

import numpy as np
import pytest
import ragged
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from podgraph.batch import Batch
from podgraph.catalog.model import Record
from podgraph.dispatch.select import Selector
from podgraph.errors import BatchError, BucketMiss
from podgraph.planner import Layout, Policy, plan, prefill_tile
from podgraph.planner.interpreter import Interpreter
from podgraph.shapes import AttentionSpec, Bucket, Demand

SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=32, page_size=16)
PAGES = 1 << 20
MANY = settings(deadline=None, derandomize=True, max_examples=150)
SOME = settings(deadline=None, derandomize=True, max_examples=60)


def records(*buckets: Bucket, replay_us: list[float] | None = None) -> list[Record]:
    times = replay_us or [0.0] * len(buckets)
    return [Record("spec", bucket, "test", -1, time) for bucket, time in zip(buckets, times, strict=True)]


def exact(bucket: Bucket) -> Demand:
    """What fills a bucket."""
    return Demand(bucket.prefill_slots, bucket.prefill_len, bucket.decode_count)


def demands() -> st.SearchStrategy[Demand]:
    small = st.integers(0, 7)
    return st.builds(
        lambda prefills, rows, decodes, idle: Demand(prefills, prefills * 2 + rows if prefills else 0, decodes, idle),
        prefills=small,
        rows=st.integers(0, 40),
        decodes=small,
        idle=st.integers(0, 2),
    )


bucket_sets = st.lists(ragged.buckets(), min_size=1, max_size=12, unique=True)


def choose(selector: Selector, demand: Demand) -> Bucket | None:
    record = selector.choose(demand)
    return None if record is None else record.bucket


def test_without_measurements_the_fewest_rows_are_cheapest() -> None:
    large, small, decode = Bucket(8, 64, 4), Bucket(8, 16, 4), Bucket(8, 0, 8)
    selector = Selector(records(large, decode, small), SPEC, PAGES)
    assert choose(selector, Demand(0, 0, 8)) == decode
    assert choose(selector, Demand(0, 0, 4)) == decode
    assert choose(selector, Demand(1, 5, 4)) == small
    assert choose(selector, Demand(1, 17, 4)) == large
    assert choose(selector, Demand(1, 65, 4)) is None
    assert choose(selector, Demand(0, 0, 9)) is None


def test_measured_costs_come_before_rows() -> None:
    wide, long = Bucket(4, 8, 0), Bucket(2, 16, 0)
    assert choose(Selector(records(wide, long, replay_us=[5.0, 4.0]), SPEC, PAGES), Demand(1, 4, 0)) == long
    assert choose(Selector(records(wide, long, replay_us=[4.0, 5.0]), SPEC, PAGES), Demand(1, 4, 0)) == wide


def test_decodes_in_decode_slots_come_before_costs() -> None:
    prefill, decode = Bucket(2, 16, 0), Bucket(2, 0, 2)
    selector = Selector(records(prefill, decode, replay_us=[1.0, 9.0]), SPEC, PAGES)
    assert choose(selector, Demand(0, 0, 2)) == decode
    assert choose(selector, Demand(0, 0, 0, idle=2)) == prefill


def test_one_missing_measurement_makes_all_costs_rows() -> None:
    wide, long = Bucket(4, 8, 0), Bucket(2, 16, 0)
    assert choose(Selector(records(wide, long, replay_us=[5.0, 0.0]), SPEC, PAGES), Demand(1, 4, 0)) == wide


def test_a_bucket_costs_no_less_than_one_that_it_contains() -> None:
    # the large one was measured faster, by noise: the small one is still taken
    small, large = Bucket(4, 16, 2), Bucket(6, 32, 3)
    selector = Selector(records(large, small, replay_us=[9.0, 10.0]), SPEC, PAGES)
    assert choose(selector, exact(small)) == small
    assert choose(selector, exact(large)) == large


def test_equal_costs_go_to_the_smaller_bucket() -> None:
    buckets = [Bucket(4, 16, 2), Bucket(4, 16, 1), Bucket(5, 16, 2), Bucket(4, 8, 2)]
    for order in (buckets, buckets[::-1]):
        selector = Selector(records(*order, replay_us=[7.0] * 4), SPEC, PAGES)
        assert choose(selector, Demand(1, 5, 1)) == Bucket(4, 8, 2)
        assert choose(selector, Demand(2, 16, 1)) == Bucket(4, 16, 1)
        assert choose(selector, Demand(2, 16, 2)) == Bucket(4, 16, 2)
        assert choose(selector, Demand(3, 16, 2)) == Bucket(5, 16, 2)


def test_no_records_choose_nothing() -> None:
    assert Selector([], SPEC, PAGES).choose(Demand(0, 0, 1)) is None


def closed_costs(buckets: list[Bucket], times: list[float]) -> dict[Bucket, float]:
    """A bucket's own time or that of the dearest bucket within it, whichever is more."""

    def within(a: Bucket, b: Bucket) -> bool:
        return (
            a.prefill_slots <= b.prefill_slots and a.prefill_len <= b.prefill_len and a.decode_count <= b.decode_count
        )

    own = dict(zip(buckets, times, strict=True))
    return {b: max(own[a] for a in buckets if within(a, b)) for b in buckets}


@MANY
@given(data=st.data(), buckets=bucket_sets, demand=demands())
def test_chooses_the_cheapest_that_fits(data: st.DataObject, buckets: list[Bucket], demand: Demand) -> None:
    times = data.draw(st.lists(st.sampled_from((1.0, 2.0, 3.0, 3.5)), min_size=len(buckets), max_size=len(buckets)))
    selector = Selector(records(*buckets, replay_us=times), SPEC, PAGES)
    cost = closed_costs(buckets, times)
    fitting = [b for b in buckets if b.fits(demand)]
    chosen = choose(selector, demand)
    if not fitting:
        assert chosen is None
        return
    assert chosen in fitting

    def rank(bucket: Bucket) -> tuple[float, ...]:
        """Decodes in prefill slots, then cost, then size."""
        rows = bucket.prefill_len + bucket.decode_count
        return max(0, demand.decodes - bucket.decode_count), cost[bucket], rows, bucket.batch, bucket.prefill_len

    assert rank(chosen) == min(map(rank, fitting))
    assert choose(selector, demand) == chosen, "asked again, it answers otherwise"


@MANY
@given(data=st.data(), buckets=bucket_sets)
def test_a_buckets_own_shape_never_takes_a_bucket_around_it(data: st.DataObject, buckets: list[Bucket]) -> None:
    noise = st.floats(1.0, 50.0)
    times = data.draw(st.lists(noise, min_size=len(buckets), max_size=len(buckets)))
    selector = Selector(records(*buckets, replay_us=times), SPEC, PAGES)
    cost = closed_costs(buckets, times)
    for bucket in buckets:
        chosen = choose(selector, exact(bucket))
        assert chosen is not None
        assert cost[chosen] <= cost[bucket]
        around = (
            chosen.prefill_slots >= bucket.prefill_slots
            and chosen.prefill_len >= bucket.prefill_len
            and chosen.decode_count >= bucket.decode_count
        )
        assert chosen == bucket or not around


@MANY
@given(data=st.data(), buckets=bucket_sets, demand=demands())
def test_the_order_of_records_does_not_matter(data: st.DataObject, buckets: list[Bucket], demand: Demand) -> None:
    times = data.draw(st.lists(st.sampled_from((1.0, 2.0)), min_size=len(buckets), max_size=len(buckets)))
    given_records = records(*buckets, replay_us=times)
    shuffled = data.draw(st.permutations(given_records))
    assert choose(Selector(given_records, SPEC, PAGES), demand) == choose(Selector(shuffled, SPEC, PAGES), demand)
    assert given_records == records(*buckets, replay_us=times), "the caller's list was reordered"


def padding(bucket: Bucket, demand: Demand) -> float:
    """Share of a bucket's rows that stay empty."""
    rows = bucket.prefill_len + bucket.decode_count
    return (rows - demand.prefill_rows - demand.decodes) / rows


@MANY
@given(buckets=bucket_sets, demand=demands(), cap=st.sampled_from((0.0, 0.25, 0.5, 1.0)))
def test_buckets_within_the_padding_cap_come_first(buckets: list[Bucket], demand: Demand, cap: float) -> None:
    selector = Selector(records(*buckets), SPEC, PAGES, cap)
    record = selector.choose(demand)
    fitting = [b for b in buckets if b.fits(demand)]
    close = [b for b in fitting if padding(b, demand) <= cap]
    assert (record is not None) == bool(fitting)
    if record is None:
        return
    assert (record.bucket in close) == bool(close)
    assert selector.over_cap(record, demand) == (not close)
    if close:
        assert record == Selector(records(*close), SPEC, PAGES).choose(demand)
    if cap == 1.0:
        assert record == Selector(records(*buckets), SPEC, PAGES).choose(demand)


@pytest.mark.parametrize(
    ("qo_lens", "max_pages", "cap", "message"),
    [
        pytest.param(
            [5, 9, 1],
            PAGES,
            None,
            "no bucket holds 2 prefills of 14 rows and 1 decodes (the largest is "
            "(batch=4, prefill_len=8, decode_count=2)); add a bucket, or bind with on_miss='split'",
            id="too large",
        ),
        pytest.param(
            [5, 1],
            1,
            None,
            "the batch names 2 pages, allowed: workspace.max_pages = 1; raise it, or bind with on_miss='split'",
            id="too many pages",
        ),
        pytest.param(
            [2, 1],
            PAGES,
            0.5,
            "every bucket that holds the batch leaves more than padding_cap=0.5 of its rows empty (the closest is "
            "(batch=4, prefill_len=8, decode_count=2)); add a closer bucket, or bind with on_miss='split'",
            id="too much padding",
        ),
    ],
)
def test_check_refuses_what_would_be_split(qo_lens: list[int], max_pages: int, cap: float | None, message: str) -> None:
    selector = Selector(records(Bucket(4, 8, 2), Bucket(2, 0, 2)), SPEC, max_pages, cap)
    with pytest.raises(BucketMiss) as raised:
        selector.check(ragged.make_batch(qo_lens, qo_lens, SPEC))
    assert str(raised.value) == message
    Selector(records(Bucket(4, 8, 2)), SPEC, 2, 0.5).check(ragged.make_batch([4, 1], [4, 1], SPEC))


@st.composite
def oversized(draw: st.DrawFn, window: bool = False) -> tuple[AttentionSpec, list[Bucket], Batch, int]:
    """A batch beyond most of the buckets: more requests, longer prefills, more pages."""
    spec = draw(ragged.specs() if window else ragged.specs(plain=True))
    buckets = draw(st.lists(ragged.buckets(slots=3, prefill_len=10), max_size=3))
    # one that takes any prefill, in blocks of at least two rows (or one more than a decode has)
    buckets.append(Bucket(draw(st.integers(1, 4)), draw(st.integers(spec.decode_rows + 1, 12)), 0))
    qo_lens = draw(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=8))
    batch = draw(ragged.batches(qo_lens, spec, kv_len=120))
    pages = int((batch.kv_indptr[1:] - batch.kv_indptr[:-1]).max(initial=1))
    return spec, buckets, batch, draw(st.sampled_from((pages, pages + 3, PAGES)))


def long_prefills(qo_lens: list[int], *buckets: Bucket) -> tuple[AttentionSpec, list[Bucket], Batch, int]:
    return SPEC, list(buckets), ragged.make_batch(qo_lens, [n + 9 for n in qo_lens], SPEC), PAGES


@MANY
@example(long_prefills([10, 10, 10], Bucket(2, 8, 0)))
@example(long_prefills([9, 9], Bucket(3, 8, 1)))
@example(long_prefills([1, 30, 1, 0, 30, 1], Bucket(2, 4, 1)))
@given(oversized())
def test_parts_cover_every_row_once_and_fit(case: tuple[AttentionSpec, list[Bucket], Batch, int]) -> None:
    spec, buckets, batch, max_pages = case
    selector = Selector(records(*buckets), spec, max_pages)
    covered = np.zeros(int(batch.qo_indptr[-1]), np.int64)
    requests = 0
    for record, part in selector.parts(batch):
        assert record.bucket in buckets
        assert ragged.holds(record.bucket, spec, part.qo_lens.tolist())
        assert record == selector.choose(part.demand(spec)), "a part has not its cheapest bucket"
        assert part.num_pages <= max_pages
        assert part.num_requests > 0
        covered[part.qo_indptr[0] : part.qo_indptr[-1]] += 1
        requests += part.num_requests
    assert (covered == 1).all()
    assert requests >= batch.num_requests
    whole_fits = any(ragged.holds(b, spec, batch.qo_lens.tolist()) for b in buckets) and batch.num_pages <= max_pages
    if whole_fits:
        assert [part for _, part in selector.parts(batch)] == [batch]


@SOME
@example(long_prefills([10, 10, 10], Bucket(2, 8, 0)))
@example(long_prefills([1, 30, 1, 0, 30, 1], Bucket(2, 4, 1)))
@given(oversized(window=True))
def test_parts_compute_what_the_whole_does(case: tuple[AttentionSpec, list[Bucket], Batch, int]) -> None:
    spec, buckets, batch, max_pages = case
    policy = Policy(ctas=24)
    layout = Layout.of(spec, buckets, policy)
    tensors = ragged.make_tensors(batch, spec)
    for record, part in Selector(records(*buckets), spec, max_pages).parts(batch):
        step = np.full(layout.step_bytes // 4, -1, np.int32)
        plan(part, record.bucket, spec, policy).pack(layout, step)
        interpreter = Interpreter(spec, layout, step, part.kv_indices, prefill_tile(record.bucket, spec))
        out, lse = torch.full_like(tensors.out, torch.nan), torch.full_like(tensors.lse, torch.nan)
        interpreter.run(tensors.q, tensors.k, tensors.v, out, lse)
        written = ~torch.isnan(lse)
        assert torch.isnan(tensors.lse[written]).all(), "two parts write the same row"
        tensors.lse[written], tensors.out[written] = lse[written], out[written]
    ragged.assert_equals_oracle(batch, spec, tensors)


def lengths(parts: list[tuple[Record, Batch]]) -> list[list[int]]:
    return [part.qo_lens.tolist() for _, part in parts]


@pytest.mark.parametrize(
    ("qo_lens", "buckets", "expected"),
    [
        pytest.param([1] * 5, [Bucket(2, 0, 2)], [[1, 1], [1, 1], [1]], id="decodes"),
        pytest.param([20], [Bucket(1, 8, 0)], [[8], [8], [4]], id="one prefill in blocks"),
        pytest.param([10, 10], [Bucket(2, 8, 0)], [[8], [2, 6], [4]], id="blocks run on into the next prefill"),
        pytest.param([9, 1, 1], [Bucket(3, 8, 2)], [[8], [1, 1, 1]], id="a last row decodes"),
        pytest.param([0, 0, 0], [Bucket(2, 0, 2)], [[0, 0], [0]], id="idle requests"),
        pytest.param([1, 6, 1], [Bucket(2, 0, 2), Bucket(1, 8, 0)], [[1], [6], [1]], id="sides apart"),
        pytest.param([5, 5], [Bucket(1, 8, 0)], [[5], [5]], id="one prefill slot"),
        pytest.param([7, 5], [Bucket(2, 8, 0)], [[7], [5]], id="no block as short as a decode"),
    ],
)
def test_where_batches_are_cut(qo_lens: list[int], buckets: list[Bucket], expected: list[list[int]]) -> None:
    batch = ragged.make_batch(qo_lens, [n + 3 for n in qo_lens], SPEC)
    assert lengths(Selector(records(*buckets), SPEC, PAGES).parts(batch)) == expected


def test_pages_split_a_batch_that_a_bucket_holds() -> None:
    batch = ragged.make_batch([1, 1, 4, 1], [48, 32, 64, 16], SPEC)  # 3, 2, 4 and 1 pages
    expected = {
        10: [[1, 1, 4, 1]],
        9: [[1, 1, 4], [1]],
        5: [[1, 1], [4, 1]],
        4: [[1], [1], [4], [1]],
    }
    for max_pages, parts in expected.items():
        assert lengths(Selector(records(Bucket(4, 8, 3)), SPEC, max_pages).parts(batch)) == parts


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "buckets", "max_pages", "request_index"),
    [
        pytest.param([1, 1], [16, 65], [Bucket(4, 8, 3)], 4, 1, id="more pages than a replay may name"),
        pytest.param([1, 5], [16, 16], [Bucket(4, 0, 4)], PAGES, 1, id="a prefill and only decode buckets"),
        pytest.param([1], [16], [], PAGES, 0, id="no bucket at all"),
    ],
)
def test_a_request_that_fits_nowhere_is_refused(
    qo_lens: list[int], kv_lens: list[int], buckets: list[Bucket], max_pages: int, request_index: int
) -> None:
    batch = ragged.make_batch(qo_lens, kv_lens, SPEC)
    message = (
        f"request {request_index}: {qo_lens[request_index]} rows on {kv_lens[request_index]} KV tokens fit no bucket, "
        f"even alone (workspace.max_pages = {max_pages}); build a catalog with larger limits or prefill slots"
    )
    with pytest.raises(BatchError) as raised:
        Selector(records(*buckets), SPEC, max_pages).parts(batch)
    assert str(raised.value) == message


def test_decodes_fit_a_prefill_bucket_of_one_row() -> None:
    batch = ragged.make_batch([1, 1], [5, 5], SPEC)
    assert lengths(Selector(records(Bucket(1, 1, 0)), SPEC, PAGES).parts(batch)) == [[1], [1]]
