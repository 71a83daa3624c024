"""The work lists of pod_sm90: run item by item in torch, they give dense attention; and they keep to their capacity."""

from __future__ import annotations

import math

import numpy as np
import pytest
import ragged
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from podgraph.planner import Capacity, Layout, Policy, Sm90WorkList, kernels_of, plan, preferred_setting
from podgraph.planner.policy import SM90_SETTINGS, sm90_setting
from podgraph.planner.sm90 import CHUNK, SPLITS
from podgraph.providers import pod_sm90
from podgraph.shapes import AttentionSpec, Bucket

LOG2_E = math.log2(math.e)
W64 = "pod_sm90_w64"
VARIANTS = st.sampled_from([pod_sm90.variant_of(setting) for setting in SM90_SETTINGS])


def specs() -> st.SearchStrategy[AttentionSpec]:
    return st.builds(
        lambda group, heads, page, window, cap, rows: AttentionSpec(
            group * heads,
            heads,
            64,
            page,
            window_left=window,
            logits_soft_cap=cap,
            decode_rows=min(rows, pod_sm90.MOST_COLUMNS // group),
        ),
        group=st.sampled_from(pod_sm90.GROUP_SIZES),
        heads=st.integers(1, 3),
        page=st.sampled_from(pod_sm90.PAGE_SIZES),
        window=st.one_of(st.just(-1), st.integers(0, 300)),
        cap=st.sampled_from((0.0, 2.5)),
        rows=st.sampled_from((1, 1, 2, 3, 4, 16)),
    )


def policies() -> st.SearchStrategy[Policy]:
    return st.builds(lambda ctas: Policy(ctas, "sm90"), st.integers(1, 200))


@st.composite
def cases(draw: st.DrawFn) -> ragged.Case:
    case = draw(ragged.cases(specs(), kv_len=2000))
    return ragged.Case(case.spec, case.bucket, draw(policies()), case.batch)


def one_long_among_short(parts: bool = True) -> ragged.Case:
    spec = AttentionSpec(4, 2, 64, 16, window_left=-1)
    bucket = Bucket(6, 0, 6)
    batch = ragged.make_batch([1] * 6, [20_000, 3, 64, 65, 0, 1], spec)
    return ragged.Case(spec, bucket, Policy(24, "sm90"), batch)


def slot_info(chunk: int, begin: int, end: int, rows: int, behind: int, skip: int) -> int:
    """What kernels/pod_sm90_decode.h tells of a chunk: which of its tokens the first row sees, plus kMostRows."""
    seen_to, seen_from = end + behind - (rows - 1), begin + skip - (rows - 1)
    return min(seen_to - chunk + 16, 127) << 11 | max(seen_from - chunk + 16, 0) << 18


def run(work: Sm90WorkList, layout: Layout, spec: AttentionSpec, tensors: ragged.Tensors) -> None:
    """What kernels/pod_sm90.cu does with the lists, read from the packed step alone."""
    step = np.full(layout.step_bytes // 4, -(1 << 30), np.int32)
    work.pack(layout, step)
    views = layout.views(step)
    _, tiles, units, _, empty = views["counts"].tolist()
    q, k, v, out, lse = tensors.q, tensors.k, tensors.v, tensors.out, tensors.lse
    tickets: set[tuple[int, int]] = set()  # (first row, counter)
    used: set[tuple[int, int]] = set()  # (partial row, row)
    parts: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor] | None]] = {}

    def attend(
        row: int,
        rows: int,
        position: int,
        begin: int,
        end: int,
        offset: int,
        pages: int,
        masked: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows over KV tokens begin to end: (out, lse) of each head. ``masked``: what the kernel's own mask leaves."""
        token = torch.arange(begin, end)
        page = torch.from_numpy(
            work.batch.kv_indices[offset + np.minimum(token.numpy() // spec.page_size, pages - 1)].astype(np.int64)
        )
        keys, values = (c[page, token % spec.page_size].repeat_interleave(spec.group_size, 1) for c in (k, v))
        logits = torch.einsum("rhd,thd->hrt", q[row : row + rows], keys) * spec.sm_scale
        if spec.logits_soft_cap:
            logits = spec.logits_soft_cap * torch.tanh(logits / spec.logits_soft_cap)
        limit = position + torch.arange(rows)[:, None]
        visible = token <= limit
        if spec.window_left >= 0:
            visible &= token >= limit - spec.window_left
        assert masked is None or torch.equal(masked, visible)
        logits = logits.masked_fill(~visible, -math.inf)
        weights = torch.softmax(logits, -1)
        return torch.einsum("hrt,thd->rhd", weights, values), torch.logsumexp(logits, -1).T * LOG2_E

    for tile in views["tiles"].reshape(-1, 12)[:tiles].tolist():
        offset, pages, row, rows, position, kv_len, begin, end, _, first, packed, ticket = tile
        assert position + rows <= kv_len
        assert begin < end <= position + rows
        number, count = packed & 4095, packed >> 12
        result, result_lse = attend(row, rows, position, begin, end, offset, pages)
        if count == 1:
            assert begin <= max(0, position - spec.window_left) if spec.window_left >= 0 else begin == 0
            out[row : row + rows], lse[row : row + rows] = result, result_lse
            continue
        assert first + (number + 1) * rows <= layout.capacity.partial_rows
        tickets.add((row, ticket))
        for i in range(rows):
            found = parts.setdefault((row + i, ticket), [None] * count)
            assert found[number] is None, "a part comes twice"
            found[number] = result[i].nan_to_num(0.0), result_lse[i]
            used.add((first + number * rows + i, row + i))
    for offset, pages, begin, end, row, first, packed, word in views["units"].reshape(-1, 8)[:units].tolist():
        number, count, skip = packed & 4095, packed >> 12 & 4095, packed >> 24
        ticket, rows, behind = word & 0xFFFF, (word >> 16 & 15) + 1, word >> 20
        assert begin % CHUNK == 0
        assert rows <= spec.decode_rows
        # from the masks that the kernel makes chunk by chunk; where the first row sees part of one, every bit counts
        visible = torch.zeros(rows, end - begin, dtype=torch.bool)
        for chunk in range(begin, end, CHUNK):
            info = slot_info(chunk, begin, end, rows, behind, skip)
            seen_to, seen_from = (info >> 11 & 127) - 16, (info >> 18 & 127) - 16
            x, r = torch.arange(min(CHUNK, end - chunk)), torch.arange(rows)[:, None]
            visible[:, chunk - begin : chunk - begin + CHUNK] = (x >= seen_from + r) & (x < seen_to + r)
        position = int(work.batch.kv_lens[np.searchsorted(work.batch.qo_indptr, row, "right") - 1]) - rows
        result, result_lse = attend(row, rows, position, begin, end, offset, pages, visible)
        if count == 1:
            out[row : row + rows], lse[row : row + rows] = result, result_lse
            continue
        assert first + (number + 1) * spec.decode_rows <= layout.capacity.partial_rows
        tickets.add((row, ticket))
        for i in range(spec.decode_rows):
            used.add((first + number * spec.decode_rows + i, row + i))
        for i in range(rows):
            found = parts.setdefault((row + i, ticket), [None] * count)
            assert found[number] is None, "a part comes twice"
            found[number] = result[i].nan_to_num(0.0), result_lse[i]
    assert len({ticket for _, ticket in tickets}) == len(tickets), "two tiles or rows share a counter"
    assert len({part for part, _ in used}) == len(used) == work.parts, "two parts share a row"
    for (row, ticket), found in parts.items():
        assert all(p is not None for p in found)
        assert 0 <= ticket < layout.capacity.merge_rows
        lses = torch.stack([p[1] for p in found if p is not None])
        total = torch.logsumexp(lses / LOG2_E, 0) * LOG2_E
        out[row] = sum(torch.exp2(p[1] - total)[:, None] * p[0] for p in found if p is not None)
        lse[row] = total
    for row, rows in views["empty_rows"].reshape(-1, 2)[:empty].tolist():
        out[row : row + rows], lse[row : row + rows] = 0, -math.inf


@settings(deadline=None, derandomize=True, max_examples=300)
@example(case=one_long_among_short(), variant="pod_sm90_w64")
@given(case=cases(), variant=VARIANTS)
def test_lists_give_dense_attention(case: ragged.Case, variant: str) -> None:
    work = plan(case.batch, case.bucket, case.spec, case.policy, variant)
    assert isinstance(work, Sm90WorkList)
    layout = Layout.of(case.spec, [case.bucket], case.policy)
    tensors = ragged.make_tensors(case.batch, case.spec)
    run(work, layout, case.spec, tensors)
    ragged.assert_equals_oracle(case.batch, case.spec, tensors)


@settings(deadline=None, derandomize=True, max_examples=400)
@given(case=cases(), variant=VARIANTS)
def test_lists_keep_to_their_capacity(case: ragged.Case, variant: str) -> None:
    """Any batch that a bucket holds has a plan: no list is ever too short, whatever the lengths."""
    capacity = Capacity.of(case.bucket, case.spec, case.policy)
    work = plan(case.batch, case.bucket, case.spec, case.policy, variant)
    assert isinstance(work, Sm90WorkList)
    assert len(work.tiles) <= capacity.prefill_items
    assert len(work.units) <= capacity.decode_items
    assert work.parts <= capacity.partial_rows
    # each CTA reads the item of its first ticket before it knows how many there are
    reach = -(-case.policy.ctas // case.spec.num_kv_heads)
    assert min(capacity.prefill_items, capacity.decode_items) >= reach


def test_a_long_decode_is_split_and_equal_ones_are_not() -> None:
    case = one_long_among_short()
    work = plan(case.batch, case.bucket, case.spec, case.policy, W64)
    assert isinstance(work, Sm90WorkList)
    assert work.parts > 4
    spec = AttentionSpec(32, 8, 128, 16)
    batch = ragged.make_batch([1] * 64, [4096] * 64, spec)
    whole = plan(batch, Bucket(64, 0, 64), spec, Policy(132, "sm90"), W64)
    assert isinstance(whole, Sm90WorkList)
    assert whole.parts == 0
    assert len(whole.units) == 64


def test_rows_see_what_they_should_at_every_edge() -> None:
    """KV that ends just behind a part, windows that begin at the end of a chunk: all rows of a request, and fewer."""
    for rows in (2, 5, 16):
        for window in (-1, 0, 3, 63, 64, 200):
            spec = AttentionSpec(1, 1, 64, 16, window_left=window, decode_rows=rows)
            kv_lens = [*range(500, 500 + CHUNK + rows), rows, rows + 1, CHUNK, CHUNK + 1]
            qo_lens = [rows - i % 2 for i in range(len(kv_lens))]
            batch = ragged.make_batch(qo_lens, kv_lens, spec)
            bucket = Bucket(len(qo_lens), 0, len(qo_lens))
            policy = Policy(132, "sm90")
            work = plan(batch, bucket, spec, policy, W64)
            assert isinstance(work, Sm90WorkList)
            tensors = ragged.make_tensors(batch, spec)
            run(work, Layout.of(spec, [bucket], policy), spec, tensors)
            ragged.assert_equals_oracle(batch, spec, tensors)


@pytest.mark.parametrize("more", range(1, 18))
def test_rows_of_split_decodes_see_across_parts(more: int) -> None:
    """The last part holds fewer tokens than rows: the first ones see nothing of it."""
    spec = AttentionSpec(2, 2, 64, 16, decode_rows=16)
    batch = ragged.make_batch([16, 3], [4 * CHUNK * 30 + more] * 2, spec)
    bucket, policy = Bucket(2, 0, 2), Policy(132, "sm90")
    work = plan(batch, bucket, spec, policy, W64)
    assert isinstance(work, Sm90WorkList)
    assert work.parts % 16 == 0
    assert work.parts > 32
    tensors = ragged.make_tensors(batch, spec)
    run(work, Layout.of(spec, [bucket], policy), spec, tensors)
    ragged.assert_equals_oracle(batch, spec, tensors)


def test_longest_come_first() -> None:
    spec = AttentionSpec(8, 2, 128, 16)
    batch = ragged.make_batch([1, 40, 1, 300, 1], [100, 800, 3000, 300, 7], spec)
    work = plan(batch, Bucket(5, 340, 3), spec, Policy(4, "sm90"), W64)
    assert isinstance(work, Sm90WorkList)
    seen = -(-(work.tiles[:, 7] - work.tiles[:, 6]) // CHUNK)
    length = work.units[:, 3] - work.units[:, 2]
    for values in (seen, -(-length // CHUNK)):
        assert (np.diff(values) <= 0).all()


def test_tiles_are_shared_only_where_they_are_few() -> None:
    spec = AttentionSpec(32, 8, 128, 16)
    few, many = (ragged.make_batch([n], [1000], spec) for n in (64, 512))
    shared = [plan(b, Bucket(1, 512, 0), spec, Policy(132, "sm90"), "pod_sm90_w64d").tiles[:, 8] for b in (few, many)]
    assert set(shared[0].tolist()) == {1}
    assert shared[1].tolist() == [0] * 16


def test_few_tiles_are_split_until_each_cta_has_one() -> None:
    spec = AttentionSpec(32, 8, 128, 16)
    batch = ragged.make_batch([64], [8192], spec)
    work = plan(batch, Bucket(1, 512, 0), spec, Policy(132, "sm90"), W64)
    assert isinstance(work, Sm90WorkList)
    assert len(work.tiles) == 16  # 2 tiles in 8 parts, of 8 heads: 128 of 132 CTAs
    assert set((work.tiles[:, 10] >> 12).tolist()) == {8}


def test_variants_name_their_kernels() -> None:
    assert {kernels_of(pod_sm90.variant_of(s)) for s in SM90_SETTINGS} == {"sm90"}
    assert kernels_of("interpreter") == kernels_of("pod_flashinfer_p128_d16") == "flashinfer"
    assert [sm90_setting(pod_sm90.variant_of(s)).shares_tiles for s in SM90_SETTINGS] == [False, False, True]
    assert [sm90_setting(pod_sm90.variant_of(s)).splits_tiles for s in SM90_SETTINGS] == [True, False, True]
    assert SPLITS[0] == (0.0, 1)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (AttentionSpec(32, 8, 128, 16), ""),
        (AttentionSpec(28, 4, 128, 64, dtype="float16", kv_layout="HND", window_left=9), ""),
        (AttentionSpec(8, 8, 64, 128, logits_soft_cap=30.0), ""),
        (AttentionSpec(32, 8, 256, 16), "head_dim 256"),
        (AttentionSpec(32, 8, 128, 1), "page_size 1"),
        (AttentionSpec(32, 8, 128, 48), "page_size 48"),
        (AttentionSpec(32, 2, 128, 16), ""),
        (AttentionSpec(18, 2, 128, 16), "num_qo_heads / num_kv_heads 9"),
        (AttentionSpec(12, 1, 128, 16), "num_qo_heads / num_kv_heads 12"),
        (AttentionSpec(8, 2, 128, 16, decode_rows=4), ""),
        (AttentionSpec(2, 2, 64, 64, decode_rows=16, window_left=9), ""),
        (AttentionSpec(8, 2, 128, 16, decode_rows=5), "num_qo_heads / num_kv_heads * decode_rows 20"),
        (AttentionSpec(8, 2, 128, 16, kv_dtype="float8_e4m3fn"), "kv_dtype float8_e4m3fn"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_kernel_does_not_serve_is_refused_by_name(spec: AttentionSpec, reason: str) -> None:
    assert pod_sm90.refusal(spec, "sm_90a") == reason
    assert pod_sm90.refusal(spec, "sm_80").startswith("sm_80: ")


def test_no_wide_block_with_a_window_or_a_soft_cap() -> None:
    plain = AttentionSpec(8, 2, 128, 16)
    assert pod_sm90.settings_of(plain) == ("w64", "w128", "w64d")
    for changed in ({"window_left": 5}, {"logits_soft_cap": 30.0}):
        assert pod_sm90.settings_of(AttentionSpec(8, 2, 128, 16, **changed)) == ("w64", "w64d")


def test_no_wide_block_with_more_than_8_columns_of_several_long_rows() -> None:
    for heads, dim, rows, wide in ((8, 128, 2, True), (6, 128, 2, True), (8, 128, 3, False), (8, 64, 4, True)):
        spec = AttentionSpec(heads, 2, dim, 16, decode_rows=rows)
        assert ("w128" in pod_sm90.settings_of(spec)) == wide
    assert "w128" in pod_sm90.settings_of(AttentionSpec(32, 2, 128, 16))  # 16 heads, one row


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "setting"),
    [
        ([512, *[1] * 32], [4096] * 33, "w64"),
        ([2048, *[1] * 60], [16_384] * 61, "w128"),
        ([256, *[1] * 16], [1024] * 17, "w64d"),
        ([1] * 64, [4096] * 64, "w64"),
        ([1] * 4, [100] * 4, "w64"),
        ([4096], [4096], "w128"),
        ([5], [5], "w64d"),
        ([0, 1], [50, 0], "w64"),
    ],
    ids=["decode weighs", "prefill weighs", "short", "decodes", "few decodes", "prefill", "tiny", "nothing"],
)
def test_a_batch_prefers_the_setting_made_for_it(qo_lens: list[int], kv_lens: list[int], setting: str) -> None:
    spec = AttentionSpec(32, 8, 128, 16)
    assert preferred_setting(ragged.make_batch(qo_lens, kv_lens, spec), spec) == setting
