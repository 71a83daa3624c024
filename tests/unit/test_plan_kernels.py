"""The planner's kernels, run thread by thread on the CPU: the numpy planner's lists, and what they refuse."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import emulated
import numpy as np
import planned
import pytest

from podgraph.batch import Batch
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
INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1
MOST_TOKENS = 1 << 24  # kMostTokens in kernels/plan.h


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


def refusal(kernels: str, report: Sequence[int] = (0,) * 4, **changed: object) -> tuple[str, int, int]:
    """What the planner reports of `BATCH` with some arrays or parameters changed; nothing may be planned then.

    Args:
        report: what the report was before.
    """
    policy = Policy.for_sms(132, kernels)  # type: ignore[arg-type]
    layout = Layout.of(SPEC, [BUCKET], policy)
    arrays = {name: np.array(changed[name], np.int32) for name in METADATA if name in changed}
    scalars = {k: v for k, v in changed.items() if k not in arrays}
    batch = replace(BATCH, **arrays)  # type: ignore[arg-type]
    num_pages = int(scalars.pop("num_pages", 0))  # type: ignore[call-overload]
    variant = "pod_sm90_w64" if kernels == "sm90" else "pod"
    scalars.setdefault("rows", 1 << 20)
    step, status, _ = emulated.plan(batch, BUCKET, SPEC, policy, variant, layout, num_pages, scalars, report=report)  # type: ignore[arg-type]
    views = layout.views(step)
    assert status[3] == (report[3] if report[0] else scalars.get("plan_number", 0) if status[0] else 0)
    if status[0]:
        assert views["counts"].tolist() == [0] * 5
        assert views["bad_page"].tolist() == [-1], "ready for the next step"
    else:
        assert views["counts"][0] == scalars.get("num_requests", batch.num_requests)
    return CODES[status[0]], status[1], status[2]


@pytest.mark.parametrize("kernels", ["sm90", "flashinfer"])
@pytest.mark.parametrize(
    ("changed", "code", "request_", "got"),
    [
        ({}, "Accepted", 0, 0),
        ({"qo_indptr": [0, 1, 21, 20, 22, 23]}, "QoIndptr", 2, 20),
        ({"qo_indptr": [-1, 1, 21, 22, 22, 23]}, "QoIndptr", 0, -1),
        ({"qo_indptr": [0, INT_MIN, INT_MAX, INT_MIN, 0, 23]}, "QoIndptr", 0, INT_MIN),
        ({"qo_indptr": [0, INT_MAX, INT_MIN, 0, 0, 0]}, "ShortKv", 0, 100),
        ({"qo_indptr": [5, 6, 26, 27, 27, 28]}, "Accepted", 0, 0),  # no number: where it begins is not known
        ({"qo_indptr": [5, 6, 26, 27, 27, 28], "plan_number": 3}, "QoIndptr", 0, 5),
        ({"qo_indptr": [5, 6, 26, 27, 27, 28], "plan_number": 3, "first_row": 5}, "Accepted", 0, 0),
        ({"plan_number": -1, "first_row": 1}, "QoIndptr", 0, 0),
        ({"plan_number": 3, "qo_indptr": [7, 1, 21, 22, 22, 23]}, "QoIndptr", 0, 7),
        ({"kv_indptr": [0, 7, 9, 8, 13, 13]}, "KvIndptr", 2, 8),
        ({"kv_indptr": [1, 8, 10, 13, 14, 14]}, "KvIndptr", 0, 1),
        ({"kv_indptr": [INT_MIN, 7, 9, 12, 13, 13]}, "KvIndptr", 0, INT_MIN),
        ({"kv_indptr": [0, INT_MAX, INT_MAX, INT_MAX, INT_MAX, INT_MAX]}, "LongKv", 0, INT_MAX),
        ({"kv_indptr": [0, INT_MAX, INT_MIN, 12, 13, 13]}, "LongKv", 0, INT_MAX),
        ({"kv_last_page_len": [INT_MIN, 4, 1, 16, 0]}, "LastPageLen", 0, INT_MIN),
        ({"kv_last_page_len": [4, 4, 1, 16, INT_MIN]}, "Accepted", 0, 0),  # no pages, no last one
        ({"kv_last_page_len": [4, 4, 17, 16, 0]}, "LastPageLen", 2, 17),
        ({"kv_last_page_len": [4, 0, 1, 16, 0]}, "LastPageLen", 1, 0),
        ({"kv_last_page_len": [4, 3, 1, 16, 0]}, "ShortKv", 1, 19),
        ({"max_kv_len": 99}, "LongKv", 0, 100),
        ({"rows": 22}, "TooManyRows", 5, 23),
        ({"num_indices": 12}, "TooManyPages", 5, 13),
        ({"num_indices": INT_MIN}, "TooManyPages", 5, 13),
        ({"max_pages": 12}, "TooManyPages", 5, 13),
        ({"rows": INT_MIN}, "TooManyRows", 5, 23),
        ({"batch": 4}, "TooManyRequests", 5, 5),
        ({"batch": INT_MIN}, "TooManyRequests", 5, 5),
        ({"num_requests": -1}, "TooManyRequests", -1, -1),
        ({"num_requests": INT_MIN, "num_pages": 6}, "TooManyRequests", INT_MIN, INT_MIN),
        ({"num_requests": 7, "num_pages": 6}, "TooManyRequests", 7, 7),
        ({"num_requests": 7, "batch": INT_MAX}, "TooManyRequests", 7, 7),
        ({"num_requests": INT_MAX, "batch": INT_MAX, "num_pages": 6}, "TooManyRequests", INT_MAX, INT_MAX),
        ({"num_requests": 6, "batch": 5, "qo_indptr": [9, 1, 0, 1, 22, 23]}, "TooManyRequests", 6, 6),
        ({"num_requests": 0, "qo_indptr": [0], "kv_indptr": [0], "plan_number": 1}, "Accepted", 0, 0),
        ({"num_requests": 0, "qo_indptr": [1], "kv_indptr": [0], "plan_number": 1}, "QoIndptr", 0, 1),
        ({"num_requests": 0, "qo_indptr": [0], "kv_indptr": [2]}, "KvIndptr", 0, 2),
        ({"num_requests": 0, "qo_indptr": [24], "kv_indptr": [0], "rows": 23}, "TooManyRows", 0, 24),
        ({"decode_count": INT_MIN}, "Accepted", 0, 0),  # all decodes take prefill slots
        ({"decode_count": INT_MIN, "prefill_len": 22}, "TooManyPrefillRows", 5, 20),
        ({"decode_count": INT_MAX}, "TooManyPrefills", 5, 1),
        ({"batch": INT_MAX, "decode_count": INT_MIN}, "Accepted", 0, 0),
        ({"prefill_len": INT_MIN}, "TooManyPrefillRows", 5, 20),
        (
            {"prefill_len": INT_MAX, "rows": INT_MAX, "qo_indptr": [0, 1, 2, 3, 3, MOST_TOKENS + 4]},
            "TooManyPrefillRows",
            5,
            MOST_TOKENS + 1,
        ),
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
        ({"kv_indices": [0] * 12 + [INT_MAX], "num_pages": INT_MAX}, "PageIndex", 3, INT_MAX),
        ({"kv_indices": [0] * 12 + [INT_MAX - 1], "num_pages": INT_MAX}, "Accepted", 0, 0),
        ({"kv_indices": [INT_MIN] + [0] * 12, "num_pages": INT_MAX}, "PageIndex", 0, INT_MIN),
        ({"num_pages": -1}, "PageIndex", 0, 0),
        ({"decode_items": 1, "merge_capacity": 0, "prefill_items": 0}, "Capacity", 5, 0),
    ],
)
def test_what_is_refused(kernels: str, changed: dict[str, object], code: str, request_: int, got: int) -> None:
    assert refusal(kernels, **changed) == (code, request_, got)


@pytest.mark.parametrize("kernels", ["sm90", "flashinfer"])
@pytest.mark.parametrize("changed", [{"batch": 4}, {"rows": 22}, {"decode_items": 0, "prefill_items": 0}], ids=str)
def test_the_first_refusal_stays(kernels: str, changed: dict[str, int]) -> None:
    """Until the host makes its code 0, no more; what is refused meanwhile plans nothing either."""
    first = [CODES.index("KvIndptr"), 3, -7, 41]
    assert refusal(kernels, first, plan_number=42, **changed) == ("KvIndptr", 3, -7)
    code, request, _ = refusal(kernels, [0, *first[1:]], plan_number=42, **changed)
    assert (code in ("TooManyRequests", "TooManyRows", "Capacity"), request) == (True, 5)


@pytest.mark.parametrize("kernels", ["sm90", "flashinfer"])
def test_a_good_step_leaves_the_report_alone(kernels: str) -> None:
    policy = Policy.for_sms(132, kernels)  # type: ignore[arg-type]
    variant, layout = "pod_sm90_w64" if kernels == "sm90" else "pod", Layout.of(SPEC, [BUCKET], policy)
    for report in ([2, 3, -7, 41], [0, 3, -7, 41]):
        step, status, _ = emulated.plan(
            BATCH, BUCKET, SPEC, policy, variant, layout, changed={"plan_number": 42}, report=report
        )
        assert status == report
        assert layout.views(step)["counts"][0] == BATCH.num_requests


def verdict(
    arrays: Mapping[str, Sequence[int]], scalars: Mapping[str, int], spec: AttentionSpec, capacity: int
) -> tuple[str, int, int]:
    """What has to be reported of a step, in numbers without an end: (refusal, request, got)."""
    n = scalars["num_requests"]
    if not 0 <= n <= min(scalars["batch"], capacity):
        return "TooManyRequests", n, n
    qo, kv, last = arrays["qo_indptr"], arrays["kv_indptr"], arrays["kv_last_page_len"]
    num_pages, pages = scalars["num_pages"], []
    if num_pages:
        pages = [
            not 0 <= page < num_pages for page in arrays["kv_indices"][: max(0, min(kv[n], scalars["num_indices"]))]
        ]
    bad_page = pages.index(True) if True in pages else -1
    if qo[0] < 0 or (scalars["plan_number"] and qo[0] != scalars["first_row"]):
        return "QoIndptr", 0, qo[0]
    for i in range(n):
        rows, own = qo[i + 1] - qo[i], kv[i + 1] - kv[i]
        if rows < 0:
            return "QoIndptr", i, qo[i + 1]
        if kv[0]:
            break
        length = (own - 1) * spec.page_size + last[i] if own > 0 else 0
        if own < 0:
            return "KvIndptr", i, kv[i + 1]
        if own and not 1 <= last[i] <= spec.page_size:
            return "LastPageLen", i, last[i]
        if 0 < length < rows:
            return "ShortKv", i, length
        if length > min(scalars["max_kv_len"], MOST_TOKENS):
            return "LongKv", i, min(length, INT_MAX)
        if kv[i] <= bad_page < kv[i + 1]:
            return "PageIndex", i, arrays["kv_indices"][bad_page]
    if kv[0]:
        return "KvIndptr", 0, kv[0]
    if qo[n] > scalars["rows"]:
        return "TooManyRows", n, qo[n]
    if kv[n] > min(scalars["num_indices"], scalars["max_pages"]):
        return "TooManyPages", n, kv[n]
    lengths = [qo[i + 1] - qo[i] for i in range(n)]
    prefills = [rows for rows in lengths if rows > spec.decode_rows]
    decodes = [rows for rows in lengths if 0 < rows <= spec.decode_rows]
    overflow = max(0, len(decodes) - scalars["decode_count"])
    if len(prefills) + overflow > scalars["batch"] - scalars["decode_count"]:
        return "TooManyPrefills", n, len(prefills) + overflow
    more = min(overflow * spec.decode_rows, sum(decodes))
    if sum(prefills) + more > min(scalars["prefill_len"], MOST_TOKENS):
        return "TooManyPrefillRows", n, sum(prefills)
    if scalars["given_prefill_len"] >= 0 and scalars["given_prefill_len"] != sum(prefills):
        return "GivenPrefillLen", n, sum(prefills)
    if scalars["given_decode_count"] >= 0 and scalars["given_decode_count"] != len(decodes):
        return "GivenDecodeCount", n, len(decodes)
    return "Accepted", 0, 0


EXTREMES = (INT_MIN, INT_MIN + 1, -(1 << 24), -2, -1, 0, 1, 2, 16, 17, 1 << 16, 1 << 24, 1 << 30, INT_MAX - 1, INT_MAX)
OF_THE_STEP = ("plan_number", "first_row", "num_requests", "num_indices", "num_pages", "rows",
               "given_prefill_len", "given_decode_count")  # fmt: skip
OF_THE_BUCKET = ("batch", "prefill_len", "decode_count", "prefill_tile", "shares_tiles", "splits_tiles")
OF_THE_CATALOG = ("max_pages", "max_kv_len")
STEPS = 2_000


def hostile(rng: np.random.Generator, value: int) -> int:
    """Another number: an extreme one, one that is close, any."""
    kind = rng.integers(3)
    if kind == 0:
        return int(rng.choice(EXTREMES))
    if kind == 1:
        return int(np.clip(value + rng.integers(-3, 4), INT_MIN, INT_MAX))
    return int(rng.integers(INT_MIN, INT_MAX + 1))


@pytest.mark.parametrize("kernels", ["sm90", "flashinfer"])
def test_hostile_steps_are_refused_as_they_should(kernels: str) -> None:
    """Steps that are right but for a place or a few, against `verdict`, with guards around all that may be written."""
    rng = np.random.default_rng(len(kernels))
    specs = [
        AttentionSpec(8, 2, 128, 16),
        AttentionSpec(4, 1, 128, 8, decode_rows=4),
        AttentionSpec(32, 8, 128, 16, window_left=20),
    ]
    buckets = [Bucket(6, 64, 4), Bucket(9, 200, 0), Bucket(5, 0, 5), Bucket(40, 300, 32)]
    policies = [Policy.for_sms(sms, kernels, way) for sms, way in ((132, "tiles"), (8, "kv_load"))]  # type: ignore[arg-type]
    variant = "pod_sm90_w64d" if kernels == "sm90" else "pod"
    seen: dict[str, int] = dict.fromkeys(CODES, 0)
    for i in range(STEPS):
        spec, bucket, policy = specs[rng.integers(3)], buckets[rng.integers(4)], policies[rng.integers(2)]
        layout = Layout.of(spec, [bucket], policy)
        decodes = int(rng.integers(0, bucket.decode_count + 1))
        prefills = int(rng.integers(0, bucket.prefill_slots + 1))
        most = max(1, bucket.prefill_len // max(prefills, 1))
        qo = rng.permutation(
            np.append(rng.integers(1, spec.decode_rows + 1, decodes), rng.integers(0, most + 1, prefills))
        )
        kv = np.where(rng.random(len(qo)) < 0.1, 0, qo + rng.integers(0, 3000 if i % 2 else 40, len(qo)))
        batch = planned.make_batch(qo, kv, spec.page_size)
        arrays = {name: getattr(batch, name).tolist() for name in METADATA}
        arrays["kv_indices"] += [0] * int(rng.integers(0, 3))
        first_row = 100 if rng.random() < 0.2 else 0
        arrays["qo_indptr"] = [row + first_row for row in arrays["qo_indptr"]]
        scalars = {
            "plan_number": int(rng.integers(2)) * (i + 1),
            "first_row": first_row,
            "num_requests": len(qo),
            "num_indices": len(arrays["kv_indices"]),
            "num_pages": int(rng.integers(2)),
            "rows": arrays["qo_indptr"][-1],
            "given_prefill_len": -1,
            "given_decode_count": -1,
            "max_pages": 1 << 24,
            "max_kv_len": 1 << 24,
            **emulated.bucket_scalars(spec, bucket, variant),
        }
        changed = set()
        for _ in range(int(rng.choice([0, 1, 1, 1, 2, 5]))):
            if rng.random() < 0.6:
                array = arrays[METADATA[rng.integers(4)]]
                if array:
                    at = int(rng.choice([0, -1, rng.integers(len(array))]))
                    array[at] = hostile(rng, array[at])
                continue
            group = (OF_THE_STEP, OF_THE_STEP, OF_THE_BUCKET, OF_THE_CATALOG)[rng.integers(4)]
            name = str(rng.choice(group))
            scalars[name] = hostile(rng, scalars[name])
            changed.add(name)
        # an array is as long as the host says: how long it is the kernel cannot see
        n = scalars["num_requests"]
        if 0 <= n <= layout.capacity.requests:
            for name, length in (("qo_indptr", n + 1), ("kv_indptr", n + 1), ("kv_last_page_len", n)):
                arrays[name] += rng.integers(INT_MIN, INT_MAX + 1, max(0, length - len(arrays[name]))).tolist()
        if scalars["num_indices"] > len(arrays["kv_indices"]):
            scalars["num_pages"] = 0
        qo_indptr, kv_indptr, last, indices = (
            np.array(arrays[name], np.int32) for name in ("qo_indptr", "kv_indptr", "kv_last_page_len", "kv_indices")
        )
        hurt = Batch(qo_indptr, kv_indptr, indices, last, spec.page_size)
        step, status, _ = emulated.plan(
            hurt, bucket, spec, policy, variant, layout, scalars["num_pages"], scalars, threads=256
        )
        code, *rest = verdict(arrays, scalars, spec, layout.capacity.requests)
        got = CODES[status[0]]
        if code == "Accepted" and got == "Capacity" and changed & set(OF_THE_BUCKET):
            code, rest = got, [n, 0]  # a bucket larger than any of the catalog's
        assert (got, *status[1:3]) == (code, *rest), f"step {i}: {arrays}, {scalars}"
        assert status[3] == (scalars["plan_number"] if status[0] else 0)
        views = layout.views(step)
        assert views["bad_page"].tolist() == [-1]
        seen[got] += 1
        if got != "Accepted":
            assert views["counts"].tolist() == [0] * 5
            continue
        assert views["counts"][0] == n
        if changed & {*OF_THE_BUCKET, "num_requests"}:
            continue
        difference = planned.difference(planned.Planned(spec, bucket, policy, variant, hurt).expected(), views)
        assert not difference, f"step {i}: {difference}: {arrays}"
    missing = {code for code, count in seen.items() if count == 0} - {"Capacity"}
    assert not missing, f"no step was refused for {missing}"


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
