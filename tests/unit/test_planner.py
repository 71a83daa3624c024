"""The planner: its work lists compute the right thing, cover every visible pair once, and stay within their bounds."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import oracle
import pytest
import ragged
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from podgraph.errors import BucketOverflow
from podgraph.planner import UNSPLIT, Capacity, Layout, Policy, WorkList, plan
from podgraph.planner.interpreter import Interpreter
from podgraph.planner.order import size_class
from podgraph.planner.policy import CHUNK_UNIT
from podgraph.shapes import AttentionSpec, Bucket

POISON = 0x7BADBEEF
GUARD = 64  # int32 words around a step's buffer
MANY = settings(deadline=None, derandomize=True, max_examples=700)
SOME = settings(deadline=None, derandomize=True, max_examples=100)
FEW = settings(deadline=None, derandomize=True, max_examples=50)

SPEC = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=32, page_size=16)
NARROW = dataclasses.replace(SPEC, window_left=100)


def tile_of(side: str, bucket: Bucket, spec: AttentionSpec) -> int:
    """Packed rows of a tile: 16 for decodes; for prefills 16, 64 or 128, the first that holds the bucket's rows."""
    if side == "decode":
        return 16
    return next((tile for tile in (16, 64) if bucket.prefill_len * spec.group_size <= tile), 128)


@dataclasses.dataclass(frozen=True)
class Item:
    """One item of a work list, as a kernel reads it.

    Attributes:
        rows: of its request, one for each packed row; ``heads`` of the group likewise.
        kv_begin, kv_end: the KV tokens that it looks at, before any mask.
        partial: first partial row of the request plus its chunk, or None where the rows go to out; row r is
            ``chunks * r`` further on.
    """

    side: str
    request: int
    rows: npt.NDArray[np.int64]
    heads: npt.NDArray[np.int64]
    kv_begin: int
    kv_end: int
    partial: int | None
    chunks: int


def items_of(work: WorkList, case: ragged.Case) -> list[Item]:
    """What the kernels make of a work list: row = packed row / group, chunks of a request from its tile's window on."""
    spec, qo_lens, kv_lens = case.spec, work.batch.qo_lens, work.batch.kv_lens
    found = []
    for side in ("prefill", "decode"):
        tile, items = tile_of(side, case.bucket, spec), getattr(work, side)
        for request, qo_tile, kv_tile in zip(
            items.request_indices, items.qo_tile_indices, items.kv_tile_indices, strict=True
        ):
            qo_len, kv_len = int(qo_lens[request]), int(kv_lens[request])
            packed = np.arange(qo_tile * tile, min((qo_tile + 1) * tile, qo_len * spec.group_size))
            assert len(packed), "an item without rows"
            span, start = max(kv_len, 1), 0
            if spec.window_left >= 0:
                span = min(span, spec.window_left + tile)
                start = max(0, kv_len - qo_len + qo_tile * tile // spec.group_size - spec.window_left)
            chunk = int(work.kv_chunk_size[request])
            begin, end, partial, chunks = start, kv_len, None, 1
            if chunk != UNSPLIT:
                begin, end = (min(start + (kv_tile + i) * chunk, kv_len) for i in (0, 1))
                chunks = -(-span // chunk)
                assert 0 <= kv_tile < chunks, "a chunk beyond the request's last"
                partial = int(work.o_indptr[request] + kv_tile)
            found.append(
                Item(
                    side,
                    int(request),
                    packed // spec.group_size,
                    packed % spec.group_size,
                    int(begin),
                    int(end),
                    partial,
                    chunks,
                )
            )
    return found


def visible(request: int, case: ragged.Case) -> npt.NDArray[np.bool_]:
    """Which KV tokens each row of a request sees, ``[rows, kv_len]``."""
    qo_len, kv_len = int(case.batch.qo_lens[request]), int(case.batch.kv_lens[request])
    last = kv_len - qo_len + np.arange(qo_len)[:, None]
    position = np.arange(kv_len)
    seen = position <= last
    return seen & (position >= last - case.spec.window_left) if case.spec.window_left >= 0 else seen


def pack(work: WorkList, layout: Layout) -> npt.NDArray[np.int32]:
    """A packed step, with poison in every word that packing leaves alone."""
    step = np.full(layout.step_bytes // 4, POISON, np.int32)
    work.pack(layout, step)
    return step


def run(case: ragged.Case, tensors: ragged.Tensors) -> None:
    work = plan(case.batch, case.bucket, case.spec, case.policy)
    layout = Layout.of(case.spec, [case.bucket], case.policy)
    tile = tile_of("prefill", case.bucket, case.spec)
    interpreter = Interpreter(case.spec, layout, pack(work, layout), case.batch.kv_indices, tile)
    interpreter.run(tensors.q, tensors.k, tensors.v, tensors.out, tensors.lse)


def split_case(spec: AttentionSpec) -> ragged.Case:
    """Splits on both sides, an unsplit decode, decodes in prefill slots, idle and empty requests."""
    qo_lens = [1, 17, 0, 1, 5, 1, 1, 1]
    kv_lens = [700, 900, 50, 0, 400, 100, 1, 513]
    batch = ragged.make_batch(qo_lens, kv_lens, spec)
    return ragged.Case(spec, Bucket(8, 40, 3), Policy(ctas=44), batch)


def causal_case(spec: AttentionSpec) -> ragged.Case:
    """Prefills across several chunks of their own KV: items hidden whole, rows with unequal numbers of parts."""
    batch = ragged.make_batch([300, 129, 1], [300, 200, 129], spec)
    return ragged.Case(spec, Bucket(3, 430, 1), Policy(ctas=200), batch)


@MANY
@example(case=split_case(SPEC), seed=0)
@example(case=split_case(NARROW), seed=0)
@example(case=causal_case(SPEC), seed=0)
@example(case=causal_case(NARROW), seed=0)
@given(case=ragged.cases(), seed=st.integers(0, 1000))
def test_results_are_the_oracles(case: ragged.Case, seed: int) -> None:
    tensors = ragged.make_tensors(case.batch, case.spec, seed)
    run(case, tensors)
    ragged.assert_equals_oracle(case.batch, case.spec, tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_in_half_precision_are_the_oracles(dtype: torch.dtype) -> None:
    case = split_case(SPEC)
    tensors = ragged.make_tensors(case.batch, case.spec, dtype=dtype)
    run(case, tensors)
    # lse stays in float32; out is rounded once, to 8 or 11 bits
    want = oracle.attention(case.batch, case.spec, tensors.q, tensors.k, tensors.v)
    np.testing.assert_allclose(oracle.float64(tensors.lse), want[1], rtol=ragged.TOLERANCE, atol=ragged.TOLERANCE)
    np.testing.assert_allclose(oracle.float64(tensors.out), want[0], rtol=torch.finfo(dtype).eps, atol=1e-6)


@SOME
@example(case=split_case(SPEC))
@example(case=split_case(NARROW))
@example(case=causal_case(SPEC))
@example(case=causal_case(NARROW))
@given(case=ragged.cases(kv_len=3000))
def test_every_visible_pair_is_covered_once(case: ragged.Case) -> None:
    work = plan(case.batch, case.bucket, case.spec, case.policy)
    qo_lens, kv_lens = case.batch.qo_lens, case.batch.kv_lens
    covered = [np.zeros((q, case.spec.group_size, kv), np.int64) for q, kv in zip(qo_lens, kv_lens, strict=True)]
    computed = [np.zeros((q, case.spec.group_size), np.int64) for q in qo_lens]
    for item in items_of(work, case):
        covered[item.request][item.rows, item.heads, item.kv_begin : item.kv_end] += 1
        computed[item.request][item.rows, item.heads] += 1
    for request in range(case.batch.num_requests):
        seen = visible(request, case)[:, None].repeat(case.spec.group_size, 1)
        assert (covered[request][seen] == 1).all(), f"request {request}: a visible pair is covered never or twice"
        # rows on empty KV are still computed: their result is zero
        assert (computed[request] >= 1).all(), f"request {request}: a row is computed by no item"
        if work.kv_chunk_size[request] == UNSPLIT:
            assert (computed[request] == 1).all(), f"request {request}: two items write the same row of out"


@SOME
@example(case=split_case(SPEC))
@example(case=split_case(NARROW))
@example(case=causal_case(SPEC))
@example(case=causal_case(NARROW))
@given(case=ragged.cases(kv_len=3000))
def test_merge_entries_name_the_partial_rows_that_items_write(case: ragged.Case) -> None:
    work = plan(case.batch, case.bucket, case.spec, case.policy)
    written: dict[int, list[tuple[int, int]]] = {}  # partial row -> (row of out, head of the group)
    wanted: dict[int, set[int]] = {}  # row of out -> the partial rows that hold something it sees
    for item in items_of(work, case):
        if item.partial is None:
            continue
        seen = visible(item.request, case)[:, item.kv_begin : item.kv_end].any(axis=1)
        for row, head in zip(item.rows.tolist(), item.heads.tolist(), strict=True):
            at, out_row = item.partial + row * item.chunks, int(case.batch.qo_indptr[item.request]) + row
            written.setdefault(at, []).append((out_row, head))
            if seen[row]:
                wanted.setdefault(out_row, set()).add(at)
    for at, heads in written.items():
        assert len(set(heads)) == len(heads), f"partial row {at} is written twice"
        assert len({row for row, _ in heads}) == 1, f"partial row {at} belongs to two rows of out"
    merged = {}
    for row, first, count in zip(work.merge_rows, work.merge_first, work.merge_count, strict=True):
        assert int(row) not in merged, f"row {row} is merged twice"
        merged[int(row)] = set(range(int(first), int(first + count)))
    split = np.flatnonzero((work.kv_chunk_size != UNSPLIT) & (case.batch.qo_lens > 0))
    of_split = [np.arange(*case.batch.qo_indptr[i : i + 2]) for i in split]
    assert sorted(merged) == np.concatenate([np.zeros(0, int), *of_split]).tolist()
    for row, partials in merged.items():
        assert partials >= wanted[row], f"row {row} is merged without a part that it sees"
        for at in partials:
            assert len(written.get(at, ())) == case.spec.group_size, f"row {row} merges what nobody wrote"
            assert written[at][0][0] == row, f"row {row} merges a part of row {written[at][0][0]}"
        if case.spec.window_left < 0:
            assert partials == wanted[row], f"row {row} merges a part that it does not see"


@FEW
@given(case=ragged.cases())
def test_sides_take_what_the_bucket_reserves(case: ragged.Case) -> None:
    work = plan(case.batch, case.bucket, case.spec, case.policy)
    prefill, decode = (set(getattr(work, side).request_indices.tolist()) for side in ("prefill", "decode"))
    qo_lens = case.batch.qo_lens
    short = np.flatnonzero((qo_lens > 0) & (qo_lens <= case.spec.decode_rows)).tolist()
    assert not prefill & decode
    assert prefill | decode == set(np.flatnonzero(qo_lens).tolist())
    # decodes take their own slots first, in request order
    assert decode == set(short[: case.bucket.decode_count])


def large_lengths(bucket: Bucket, spec: AttentionSpec) -> st.SearchStrategy[list[int]]:
    """Rows of requests as a bucket of serving size meets them: all full where that can be, or random ones."""
    slots = bucket.prefill_slots
    full = [bucket.prefill_len // slots + (i < bucket.prefill_len % slots) for i in range(slots)] if slots else []
    full += [spec.decode_rows] * bucket.decode_count
    some = ragged.lengths_within(bucket, spec)
    return st.one_of(st.permutations(full), some) if ragged.holds(bucket, spec, full) else some


@st.composite
def large_cases(draw: st.DrawFn) -> tuple[ragged.Case, list[Bucket]]:
    spec = draw(ragged.specs(plain=True))
    bucket = draw(ragged.buckets(slots=24, prefill_len=1500))
    qo_lens = draw(large_lengths(bucket, spec))
    longest = draw(st.sampled_from((300, 5000, 100_000)))
    kv_lens = [qo + draw(st.integers(0, longest)) for qo in qo_lens]
    policy = Policy(ctas=draw(st.integers(1, 1200)))
    others = draw(st.lists(ragged.buckets(slots=24, prefill_len=1500), max_size=2))
    return ragged.Case(spec, bucket, policy, ragged.make_batch(qo_lens, kv_lens, spec)), [*others, bucket]


@SOME
@given(drawn=large_cases())
def test_work_lists_stay_within_their_capacities(drawn: tuple[ragged.Case, list[Bucket]]) -> None:
    case, all_buckets = drawn
    work = plan(case.batch, case.bucket, case.spec, case.policy)  # a BucketOverflow would be a capacity too small
    layout = Layout.of(case.spec, all_buckets, case.policy)
    assert case.batch.num_requests <= layout.capacity.requests
    assert len(work.prefill.request_indices) <= layout.capacity.prefill_items
    assert len(work.decode.request_indices) <= layout.capacity.decode_items
    assert len(work.merge_rows) <= layout.capacity.merge_rows
    taken = np.zeros(layout.capacity.partial_rows, np.int64)
    for item in items_of(work, case):
        if item.partial is not None:
            rows = np.unique(item.rows)
            assert item.partial + rows.max() * item.chunks < layout.capacity.partial_rows
            np.add.at(taken, item.partial + rows * item.chunks, 1)
    # two tiles may share a row (its heads fall into both), never more
    assert taken.max(initial=0) <= 2
    own = [set(range(o, o + q * c)) for o, q, c in partial_rows(work, case)]
    assert sum(map(len, own)) == len(set().union(*own)), "two requests share a partial row"


def partial_rows(work: WorkList, case: ragged.Case) -> list[tuple[int, int, int]]:
    """(first partial row, query rows, chunks) of every split request of a specification without a window."""
    split = np.flatnonzero((work.kv_chunk_size != UNSPLIT) & (case.batch.qo_lens > 0))
    chunks = -(-case.batch.kv_lens[split] // work.kv_chunk_size[split])
    return list(zip(work.o_indptr[split].tolist(), case.batch.qo_lens[split].tolist(), chunks.tolist(), strict=True))


def test_both_sides_split_and_some_requests_do_not() -> None:
    case = split_case(SPEC)
    work = plan(case.batch, case.bucket, case.spec, case.policy)
    chunks = {item.request: item.chunks for item in items_of(work, case)}
    assert [chunks.get(i) for i in range(8)] == [6, 8, None, 1, 4, 1, 1, 5]
    assert work.kv_chunk_size.tolist() == [128, 128, UNSPLIT, UNSPLIT, 128, UNSPLIT, UNSPLIT, 128]
    sides = {item.request: item.side for item in items_of(work, case)}
    assert [sides.get(i) for i in range(8)] == [
        "decode", "prefill", None, "decode", "prefill", "decode", "prefill", "prefill",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("qo_lens", "bucket", "got"),
    [
        ([1, 1, 1], Bucket(2, 0, 2), "3 requests: 0 prefills of 0 rows, 3 decodes"),
        ([0, 0, 1], Bucket(2, 0, 2), "3 requests: 0 prefills of 0 rows, 1 decodes"),
        ([9], Bucket(2, 8, 1), "1 requests: 1 prefills of 9 rows, 0 decodes"),
        ([4, 4], Bucket(2, 8, 1), "2 requests: 2 prefills of 8 rows, 0 decodes"),
        ([8, 1, 1], Bucket(4, 8, 1), "3 requests: 1 prefills of 8 rows, 2 decodes"),
        ([2], Bucket(2, 0, 2), "1 requests: 1 prefills of 2 rows, 0 decodes"),
    ],
    ids=[
        "too many decodes",
        "idle requests take slots",
        "too many rows",
        "too few prefill slots",
        "a decode in excess finds no row",
        "a prefill in a decode bucket",
    ],
)
def test_what_does_not_fit_overflows(qo_lens: list[int], bucket: Bucket, got: str) -> None:
    batch = ragged.make_batch(qo_lens, [n + 5 for n in qo_lens], SPEC)
    with pytest.raises(BucketOverflow) as raised:
        plan(batch, bucket, SPEC, Policy(ctas=8))
    assert str(raised.value) == f"bucket {bucket} does not hold {got}; choose a larger one or split the batch"


@MANY
@given(
    bucket=ragged.buckets(slots=3, prefill_len=12),
    qo_lens=st.lists(st.integers(0, 6), max_size=7),
    spec=ragged.specs(),
)
def test_overflows_exactly_where_the_bucket_does_not_hold_the_batch(
    bucket: Bucket, qo_lens: list[int], spec: AttentionSpec
) -> None:
    batch = ragged.make_batch(qo_lens, [n + 5 for n in qo_lens], spec)
    if ragged.holds(bucket, spec, qo_lens):
        plan(batch, bucket, spec, Policy(ctas=8))
    else:
        with pytest.raises(BucketOverflow):
            plan(batch, bucket, spec, Policy(ctas=8))


@FEW
@example(case=split_case(SPEC), others=[])
@given(case=ragged.cases(), others=st.lists(ragged.buckets(), max_size=2))
def test_pack_writes_its_arrays_and_nothing_else(case: ragged.Case, others: list[Bucket]) -> None:
    work = plan(case.batch, case.bucket, case.spec, case.policy)
    layout = Layout.of(case.spec, [case.bucket, *others], case.policy)
    words = layout.step_bytes // 4
    memory = np.full(words + 2 * GUARD, POISON, np.int32)
    work.pack(layout, memory[GUARD : GUARD + words])
    expected = memory.copy()
    expected[:] = POISON
    for name, values in expected_arrays(work).items():
        array = layout.arrays[name]
        at = GUARD + (array.offset + (layout.sizes["meta"] if array.region == "plan" else 0)) // 4
        assert len(values) <= array.length, name
        expected[at : at + len(values)] = values
    np.testing.assert_array_equal(memory, expected)


def expected_arrays(work: WorkList) -> dict[str, npt.NDArray[np.int64]]:
    """Every array of a step by its name in kernels/args.h, up to its live length."""
    batch = work.batch
    counts = (
        batch.num_requests,
        len(work.prefill.request_indices),
        len(work.decode.request_indices),
        len(work.merge_rows),
        0,
    )
    lists = {
        f"{side}_{name}": getattr(getattr(work, side), name)
        for side in ("prefill", "decode")
        for name in ("request_indices", "qo_tile_indices", "kv_tile_indices")
    }
    return lists | {
        "qo_indptr": batch.qo_indptr,
        "kv_indptr": batch.kv_indptr,
        "kv_last_page_len": batch.kv_last_page_len,
        "counts": np.array(counts),
        "kv_chunk_size": work.kv_chunk_size,
        "o_indptr": work.o_indptr,
        "merge_rows": work.merge_rows,
        "merge_first": work.merge_first,
        "merge_count": work.merge_count,
    }


@SOME
@given(
    spec=ragged.specs(),
    all_buckets=st.lists(ragged.buckets(24, 1500), min_size=1, max_size=4),
    policy=ragged.policies(),
)
def test_layout_places_arrays_apart_and_aligned(spec: AttentionSpec, all_buckets: list[Bucket], policy: Policy) -> None:
    layout = Layout.of(spec, all_buckets, policy)
    for region in ("meta", "plan"):
        end = 0
        for array in sorted((a for a in layout.arrays.values() if a.region == region), key=lambda a: a.offset):
            assert array.offset >= end, f"{array.name} overlaps the array before it"
            assert array.offset % 16 == 0
            end = array.offset + 4 * array.length
        assert end <= layout.sizes[region]
    assert layout.step_bytes == layout.sizes["meta"] + layout.sizes["plan"]
    elements = layout.capacity.partial_rows * spec.num_qo_heads
    assert layout.partial_lse_offset >= 2 * elements * spec.head_dim
    assert layout.sizes["partials"] >= layout.partial_lse_offset + 4 * elements
    assert all(size % 16 == 0 and size > 0 for size in layout.sizes.values())
    for bucket in all_buckets:
        own = Capacity.of(bucket, spec, policy)
        for field in dataclasses.fields(Capacity):
            assert getattr(layout.capacity, field.name) >= getattr(own, field.name)


def test_equal_batches_get_equal_plans() -> None:
    case, again = split_case(SPEC), split_case(SPEC)
    layout = Layout.of(SPEC, [case.bucket], case.policy)
    first, second = (pack(plan(c.batch, c.bucket, c.spec, c.policy), layout) for c in (case, again))
    np.testing.assert_array_equal(first, second)


@SOME
@example(case=split_case(SPEC))
@example(case=causal_case(SPEC))
@given(case=ragged.cases(spec=ragged.specs(plain=True), kv_len=3000))
def test_items_are_few_and_sorted_longest_first(case: ragged.Case) -> None:
    items = items_of(plan(case.batch, case.bucket, case.spec, case.policy), case)
    for side in ("prefill", "decode"):
        own = [item for item in items if item.side == side]
        # the tokens that the last row of each item sees
        lengths = [int(visible(i.request, case)[i.rows.max(), i.kv_begin : i.kv_end].sum()) for i in own]
        classes = size_class(-(-np.array(lengths, np.int64) // CHUNK_UNIT)).tolist()
        assert classes == sorted(classes, reverse=True), side
        if any(item.partial is not None for item in own):
            # a split side stays within one round of the grid; decodes go beyond it where an estimate says that it pays
            decodes = len({item.request for item in own})
            more = decodes + case.policy.decode_extra(case.spec) if side == "decode" else 0
            assert len(own) <= max(case.policy.ctas // case.spec.num_kv_heads, more)
            assert all(n for n, item in zip(lengths, own, strict=True) if item.partial is not None)
