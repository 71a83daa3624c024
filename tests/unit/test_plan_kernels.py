"""The planner's kernels, run thread by thread on the CPU: the numpy planner's lists, and what they refuse."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import emulated
import numpy as np
import planned
import pytest

from podgraph.dispatch.planning import REFUSALS
from podgraph.planner import Layout, Policy
from podgraph.planner.order import longest_first, size_class
from podgraph.shapes import AttentionSpec, Bucket

pytestmark = pytest.mark.skipif(emulated.CXX is None, reason="no C++ compiler")
SPEC = AttentionSpec(8, 2, 128, 16)
BUCKET = Bucket(6, 64, 4)
METADATA = ("qo_indptr", "kv_indptr", "kv_last_page_len", "kv_indices")
BATCH = planned.make_batch(np.array([1, 20, 1, 0, 1]), np.array([100, 20, 33, 16, 0]), 16)
CODES = re.findall(
    r"^  k(\w+),", (Path(emulated.KERNELS) / "args.h").read_text().split("enum Refusal")[1], re.MULTILINE
)


@pytest.mark.parametrize("seed", range(8))
def test_the_lists_are_those_of_the_numpy_planner(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(12):
        case = planned.random_case(rng, most_requests=300)
        step, status, at = emulated.plan(
            case.batch,
            case.bucket,
            case.spec,
            case.policy,
            case.variant,
            case.layout,
            num_pages=1,
            threads=int(rng.choice([256, 512, 1024])),
        )
        assert status == [0] * 4
        assert at == 0, "kernels read kv_indices where the caller has them"
        difference = planned.difference(case.expected(), case.layout.views(step))
        assert not difference, f"{case}: {difference}"


@pytest.mark.parametrize("threads", [256, 512, 1024])
def test_few_long_requests_are_split_alike(threads: int) -> None:
    """The search for the length of a part must find the very least, whatever number of warps looks."""
    rng = np.random.default_rng(3)
    for _ in range(60):
        heads, n = int(rng.choice([1, 2, 8])), int(rng.integers(1, 5))
        decode_rows = int(rng.choice([1, 2, 4]))
        spec = AttentionSpec(
            heads * 4, heads, 128, 64, window_left=int(rng.choice([-1, 1000])), decode_rows=decode_rows
        )
        kernels = ("sm90", "flashinfer")[int(rng.integers(2))]
        policy = Policy.for_sms(int(rng.choice([0, 78, 132])), kernels, ("tiles", "kv_load")[int(rng.integers(2))])
        qo = np.where(rng.random(n) < 0.5, rng.integers(1, decode_rows + 1, n), rng.integers(2, 60, n))
        batch = planned.make_batch(qo, qo + np.exp(rng.uniform(5, 13, n)).astype(np.int64), 64)
        demand = batch.demand(spec)
        bucket = Bucket(n, demand.prefill_rows, demand.decodes)
        case = planned.Planned(spec, bucket, policy, "pod_sm90_w64d" if kernels == "sm90" else "pod", batch)
        step, status, _ = emulated.plan(batch, bucket, spec, policy, case.variant, case.layout, threads=threads)
        assert status == [0] * 4
        difference = planned.difference(case.expected(), case.layout.views(step))
        assert not difference, f"{case}: {difference}"


def refusal(kernels: str, **changed: object) -> tuple[str, int, int]:
    """What the planner reports of `BATCH` with some arrays or parameters changed; nothing may be planned then."""
    policy = Policy.for_sms(132, kernels)  # type: ignore[arg-type]
    layout = Layout.of(SPEC, [BUCKET], policy)
    arrays = {name: np.array(changed[name], np.int32) for name in METADATA if name in changed}
    scalars = {k: v for k, v in changed.items() if k not in arrays}
    batch = replace(BATCH, **arrays)  # type: ignore[arg-type]
    num_pages = int(scalars.pop("num_pages", 0))  # type: ignore[call-overload]
    variant = "pod_sm90_w64" if kernels == "sm90" else "pod"
    scalars.setdefault("rows", 1 << 20)
    step, status, _ = emulated.plan(batch, BUCKET, SPEC, policy, variant, layout, num_pages, scalars)  # type: ignore[arg-type]
    views = layout.views(step)
    if status[0]:
        assert views["counts"].tolist() == [0] * 5
        assert views["bad_page"].tolist() == [-1], "ready for the next step"
    else:
        assert views["counts"][0] == batch.num_requests
    return CODES[status[0]], status[1], status[2]


@pytest.mark.parametrize("kernels", ["sm90", "flashinfer"])
@pytest.mark.parametrize(
    ("changed", "code", "request_", "got"),
    [
        ({}, "Accepted", 0, 0),
        ({"qo_indptr": [0, 1, 21, 20, 22, 23]}, "QoIndptr", 2, 20),
        ({"qo_indptr": [-1, 1, 21, 22, 22, 23]}, "QoIndptr", 0, 1),
        ({"kv_indptr": [0, 7, 9, 8, 13, 13]}, "KvIndptr", 2, 8),
        ({"kv_last_page_len": [4, 4, 17, 16, 0]}, "LastPageLen", 2, 17),
        ({"kv_last_page_len": [4, 0, 1, 16, 0]}, "LastPageLen", 1, 0),
        ({"kv_last_page_len": [4, 3, 1, 16, 0]}, "ShortKv", 1, 19),
        ({"max_kv_len": 99}, "LongKv", 0, 100),
        ({"rows": 22}, "TooManyRows", 5, 23),
        ({"num_indices": 12}, "TooManyPages", 5, 13),
        ({"max_pages": 12}, "TooManyPages", 5, 13),
        ({"batch": 4}, "TooManyRequests", 5, 5),
        ({"prefill_len": 19}, "TooManyPrefillRows", 5, 20),
        ({"decode_count": 2, "batch": 5, "prefill_len": 20}, "TooManyPrefillRows", 5, 20),
        ({"decode_count": 0, "batch": 5, "prefill_len": 23}, "Accepted", 0, 0),
        ({"decode_count": 1, "batch": 3}, "TooManyRequests", 5, 5),
        ({"decode_count": 4, "batch": 5, "qo_indptr": [0, 2, 22, 23, 23, 24]}, "TooManyPrefills", 5, 2),
        ({"given_prefill_len": 20, "given_decode_count": 3}, "Accepted", 0, 0),
        ({"given_prefill_len": 19}, "GivenPrefillLen", 5, 20),
        ({"given_decode_count": 4}, "GivenDecodeCount", 5, 3),
        ({"kv_indices": [0] * 8 + [5] + [0] * 4, "num_pages": 5}, "PageIndex", 1, 5),
        ({"kv_indices": [0] * 8 + [5] + [0] * 4, "num_pages": 6}, "Accepted", 0, 0),
        ({"kv_indices": [0] * 12 + [-1], "num_pages": 6}, "PageIndex", 3, -1),
        ({"kv_indices": [0] * 13 + [-1], "num_pages": 6}, "Accepted", 0, 0),
        ({"decode_items": 1, "merge_capacity": 0, "prefill_items": 0}, "Capacity", 5, 0),
    ],
)
def test_what_is_refused(kernels: str, changed: dict[str, object], code: str, request_: int, got: int) -> None:
    assert refusal(kernels, **changed) == (code, request_, got)


def test_garbage_never_gets_through() -> None:
    """Random bytes instead of the arrays: refused, or a batch that checks as one on the host."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        arrays = {
            "qo_indptr": np.cumsum(rng.integers(-1, 3, 6))
            if rng.random() < 0.5
            else rng.integers(-(1 << 31), 1 << 31, 6),
            "kv_indptr": np.cumsum(rng.integers(-1, 5, 6))
            if rng.random() < 0.5
            else rng.integers(-(1 << 31), 1 << 31, 6),
            "kv_last_page_len": rng.integers(-2, 20, 5),
        }
        code, _, _ = refusal("sm90", **arrays)
        qo, kv, last = arrays.values()
        pages = np.diff(kv)
        length = np.where(pages > 0, (pages - 1) * 16 + last, 0)
        sound = (
            (qo >= 0).all() and (np.diff(qo) >= 0).all() and (kv >= 0).all() and (pages >= 0).all()
            and ((pages == 0) | ((last >= 1) & (last <= 16))).all() and ((length == 0) | (length >= np.diff(qo))).all()
        )  # fmt: skip
        assert sound or code != "Accepted"


def test_every_refusal_has_words() -> None:
    assert len(REFUSALS) == len(CODES)


def test_size_classes_grow_with_length_and_keep_the_order_within_one() -> None:
    lengths = np.arange(1 << 19)
    classes = size_class(lengths)
    assert (np.diff(classes) >= 0).all()
    assert classes.max() < 256
    first = np.flatnonzero(np.diff(classes, prepend=-1))
    last = np.append(first[1:], len(lengths)) - 1
    assert ((last - first) * 16 <= np.maximum(first, 1)).all(), "lengths of one class differ by 1/16 at most"
    order = longest_first(np.array([3, 100, 101, 7, 3, 100]))
    assert order.tolist() == [1, 2, 5, 3, 0, 4]
