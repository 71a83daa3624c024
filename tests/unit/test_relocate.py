"""Relocation: what three captures prove, what they expose, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podgraph.capture.relocate import Capture, Place, Relocated, relocate
from podgraph.capture.template import topological_order
from podgraph.catalog.model import KernelNode, Relocation, Slot
from podgraph.errors import CaptureError
from podgraph.planner import Layout, Policy
from podgraph.planner.args import PLAN, RUN, Args, fill, fill_plan
from podgraph.shapes import AttentionSpec, Bucket

SPEC = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=128, page_size=16)
LAYOUT = Layout.of(SPEC, [Bucket(4, 64, 2)], Policy(ctas=16))
REGIONS = {**dict.fromkeys(RUN.pointers, 4096), **LAYOUT.sizes}
DEVICE_MEMORY = range(0x7F00_0000_0000, 0x7F01_0000_0000)  # every address that the synthetic driver calls its own
BASES = (0x7F00_1000_0000, 0x7F00_5000_0000, 0x7F00_9000_0000)
STRIDES = tuple({name: step * (i + 1) for i, name in enumerate(RUN.scalars)} for step in (128, 1024, 8))
TAIL = len(bytes(Args()))  # where parameters of a kernel with more than `Args` go on


def places(base: int, step: int) -> dict[str, Place]:
    """Regions one behind the other without a gap, each ``step`` bytes further shifted than the one before it."""
    found = {}
    for i, (name, size) in enumerate(REGIONS.items()):
        found[name] = Place(base + step * i, size)
        base += size
    return found


def capture(which: int, tail: bytes = b"", nodes: int = 1, edit: Callable[[bytearray], None] | None = None) -> Capture:
    """A capture at one of the ``BASES``; ``edit`` changes the parameters of its last node."""
    regions, strides = places(BASES[which], 256 * which), STRIDES[which]
    params = bytearray(bytes(fill(SPEC, LAYOUT, {n: p.address for n, p in regions.items()}, strides)) + tail)
    kernels = []
    for i in range(nodes):
        if edit is not None and i == nodes - 1:
            edit(params)
        kernels.append(KernelNode("ab" * 32, f"kernel_{i}", (132, 1, 1), (128, 1, 1), 1024 * i, bytes(params)))
    return Capture(tuple(kernels), regions, strides)


def put(name: str, value: int) -> Callable[[bytearray], None]:
    """Sets a field of `Args`."""
    offset, size = RUN.offset_of(name), getattr(Args, name).size

    def edit(params: bytearray) -> None:
        params[offset : offset + size] = value.to_bytes(size, "little")

    return edit


def word(value: int) -> bytes:
    return struct.pack("<Q", value)


def prove(a: Capture, b: Capture, again: Capture | None = None) -> Relocated:
    return relocate(a, a if again is None else again, b, RUN, lambda address: address in DEVICE_MEMORY)


def expected_relocations(node: int = 0) -> set[Relocation]:
    """Every pointer of `Args`, from the layout alone."""
    found = {Relocation(node, RUN.offset_of(name), name, 0) for name in (*RUN.pointers, "counters")}
    found |= {
        Relocation(node, RUN.offset_of(a.name), a.region, a.offset)
        for a in LAYOUT.arrays.values()
        if hasattr(Args, a.name)
    }
    found.add(Relocation(node, RUN.offset_of("partial_out"), "partials", 0))
    found.add(Relocation(node, RUN.offset_of("partial_lse"), "partials", LAYOUT.partial_lse_offset))
    return found


def rebuild(relocated: Relocated, which: int) -> list[bytes]:
    """The parameters at other addresses and strides, as a runtime fills them."""
    regions, strides = places(BASES[which], 256 * which), STRIDES[which]
    params = [bytearray(node.params) for node in relocated.nodes]
    for r in relocated.relocations:
        assert params[r.node][r.offset : r.offset + 8] == bytes(8), "a relocated word is not zero"
        params[r.node][r.offset : r.offset + 8] = word(regions[r.region].address + r.addend)
    for s in relocated.slots:
        value = regions[s.name].address if s.name in regions else strides[s.name]
        params[s.node][s.offset : s.offset + s.size] = value.to_bytes(s.size, "little")
    return [bytes(p) for p in params]


def test_every_pointer_is_found_with_its_region_and_addend() -> None:
    relocated = prove(capture(0, nodes=2), capture(1, nodes=2))
    assert set(relocated.relocations) == expected_relocations(0) | expected_relocations(1)
    assert len(relocated.relocations) == len(set(relocated.relocations))
    named = [
        Slot(name, node, RUN.offset_of(name), RUN.slots[name][1])
        for node in (0, 1)
        for name in (*RUN.pointers, *RUN.scalars)
    ]
    assert sorted(relocated.slots, key=str) == sorted(named, key=str)


def test_what_is_left_holds_neither_addresses_nor_strides() -> None:
    (node,) = prove(capture(0), capture(1)).nodes
    blank = bytes(fill(SPEC, LAYOUT, dict.fromkeys(REGIONS, 0), dict.fromkeys(RUN.scalars, 0)))
    addends = [RUN.offset_of(a.name) for a in LAYOUT.arrays.values() if hasattr(Args, a.name)] + [
        RUN.offset_of("partial_lse")
    ]
    wanted = bytearray(blank)
    for offset in addends:
        wanted[offset : offset + 8] = bytes(8)
    assert node.params == bytes(wanted)
    before = capture(0).nodes[0]
    assert dataclasses.replace(node, params=b"") == dataclasses.replace(before, params=b"")


def test_rebuilt_at_a_third_place_it_is_what_a_capture_there_holds() -> None:
    relocated = prove(capture(0, nodes=3), capture(1, nodes=3))
    assert rebuild(relocated, 2) == [node.params for node in capture(2, nodes=3).nodes]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    points=st.lists(st.tuples(st.sampled_from(sorted(REGIONS)), st.integers(0, 4096)), max_size=5),
    scalars=st.binary(max_size=15),
)
def test_addresses_anywhere_behind_the_fields_are_found_too(points: list[tuple[str, int]], scalars: bytes) -> None:
    points = [(name, min(addend, REGIONS[name])) for name, addend in points]
    # scalars that the synthetic driver does not take for an address
    scalars = bytes(byte & 0x3F for byte in scalars)
    captures = []
    for which in range(3):
        regions = places(BASES[which], 256 * which)
        tail = b"".join(word(regions[name].address + addend) for name, addend in points)
        captures.append(capture(which, tail + scalars))
    relocated = prove(captures[0], captures[1])
    found = {Relocation(0, TAIL + 8 * i, name, addend) for i, (name, addend) in enumerate(points)}
    assert set(relocated.relocations) == expected_relocations() | found
    assert rebuild(relocated, 2) == [captures[2].nodes[0].params]


@pytest.mark.parametrize(
    "stale",
    [(0x7FFE_1234_5678_9ABC, 0x7FFE_0000_1111_2222), (BASES[0] + 8, BASES[0] + 16), (1, 0)],
    ids=["stack addresses", "device addresses", "flags"],
)
@pytest.mark.parametrize("in_b", ["first", "second", "another"])
def test_garbage_becomes_zero(stale: tuple[int, int], in_b: str) -> None:
    others = {"first": stale[0], "second": stale[1], "another": 0x1122_3344_5566_7788}
    a, again, b = capture(0, word(stale[0])), capture(0, word(stale[1])), capture(1, word(others[in_b]))
    relocated = prove(a, b, again)
    differing = [x != y for x, y in zip(word(stale[0]), word(stale[1]), strict=True)]
    kept = bytes(0 if differs else byte for differs, byte in zip(differing, word(stale[0]), strict=True))
    assert relocated.nodes[0].params[TAIL:] == kept
    assert set(relocated.relocations) == expected_relocations()


def test_garbage_beside_a_word_does_not_hide_it() -> None:
    regions = [places(BASES[which], 256 * which) for which in range(2)]
    a, again, b = (
        capture(which, word(garbage) + word(regions[which]["lse"].address + 12))
        for which, garbage in ((0, 0x0101), (0, 0x0202), (1, 0x0303))
    )
    assert Relocation(0, TAIL + 8, "lse", 12) in prove(a, b, again).relocations


def refused(a: Capture, b: Capture, again: Capture | None = None) -> str:
    with pytest.raises(CaptureError) as raised:
        prove(a, b, again)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_device_address_of_no_region_is_refused() -> None:
    hidden = BASES[2] + 0x40
    message = refused(capture(0, bytes(8) + word(hidden)), capture(1, bytes(8) + word(hidden)))
    assert message == (
        f"node 0 (kernel_0), parameter offset {TAIL + 8}: {hidden:#x} is a device address that belongs to no region"
    )
    # the same word is a number where the driver does not know it
    relocate(*(capture(i, word(hidden)) for i in (0, 0, 1)), RUN, lambda address: False)


def test_a_field_that_stays_at_its_first_address_is_refused() -> None:
    address = places(BASES[0], 0)["plan"].address
    message = refused(capture(0), capture(1, edit=put("counts", address)))
    assert (
        f"parameter offset {RUN.offset_of('counts')}: {address:#x} is a device address that belongs to no region"
        in message
    )


@pytest.mark.parametrize("error", [8, -8, 1 << 32], ids=hex)
def test_a_word_that_moved_by_another_amount_is_refused(error: int) -> None:
    first, second = (places(BASES[which], 256 * which)["partials"].address for which in range(2))
    message = refused(capture(0, word(first)), capture(1, word(second + error)))
    assert message == (
        f"node 0 (kernel_0), parameter offset {TAIL}: {first:#x} moved by {second + error - first:#x}, "
        "which is no region's own shift"
    )


@pytest.mark.parametrize("outside", [-8, 4096 + 8], ids=["before", "behind"])
def test_a_word_that_moved_like_a_region_but_lies_outside_is_refused(outside: int) -> None:
    first, second = (places(BASES[which], 256 * which)["k"].address + outside for which in range(2))
    assert "which is no region's own shift" in refused(capture(0, word(first)), capture(1, word(second)))


def test_a_counter_is_refused() -> None:
    assert "0x1 moved by 0x1, which is no region's own shift" in refused(capture(0, word(1)), capture(1, word(2)))


def test_a_scalar_that_changes_is_refused() -> None:
    message = refused(capture(0), capture(1, edit=put("num_kv_heads", 3)))
    assert f"parameter offset {RUN.offset_of('num_qo_heads')}" in message


@pytest.mark.parametrize("name", RUN.pointers)
def test_a_pointer_that_is_not_at_the_start_of_its_region_is_refused(name: str) -> None:
    a, b = (capture(which, edit=put(name, places(BASES[which], 256 * which)[name].address + 16)) for which in range(2))
    assert refused(a, b) == f"node 0 (kernel_0): field {name} does not follow its region"


def test_a_pointer_to_another_region_is_refused() -> None:
    a, b = (capture(which, edit=put("k", places(BASES[which], 256 * which)["v"].address)) for which in range(2))
    assert refused(a, b) == "node 0 (kernel_0): field k does not follow its region"


def test_a_pointer_that_is_null_is_refused() -> None:
    a, b = (capture(which, edit=put("lse", 0)) for which in range(2))
    assert refused(a, b) == "node 0 (kernel_0): field lse does not follow its region"


@pytest.mark.parametrize("name", RUN.scalars)
@pytest.mark.parametrize("which", [0, 1], ids=["in a", "in b"])
def test_a_stride_that_was_not_launched_with_is_refused(name: str, which: int) -> None:
    captures = [capture(0), capture(1)]
    captures[which] = capture(which, edit=put(name, 72))
    assert refused(*captures) == (f"node 0 (kernel_0): field {name} holds 72, launched with {STRIDES[which][name]}")


@pytest.mark.parametrize(("x", "y"), list(itertools.combinations(RUN.scalars, 2)), ids=str)
def test_swapped_strides_are_refused(x: str, y: str) -> None:
    def swap(which: int) -> Callable[[bytearray], None]:
        def edit(params: bytearray) -> None:
            put(x, STRIDES[which][y])(params)
            put(y, STRIDES[which][x])(params)

        return edit

    assert f"field {x} holds" in refused(capture(0, edit=swap(0)), capture(1, edit=swap(1)))


@pytest.mark.parametrize("name", ["q", "lse", "q_stride_n", "v_stride_h"])
def test_garbage_in_a_field_that_run_sets_is_refused(name: str) -> None:
    message = refused(capture(0), capture(1), again=capture(0, edit=put(name, 0x0BAD)))
    assert message == "node 0 (kernel_0): a named field differs between two captures of the same launch"


@pytest.mark.parametrize("where", ["again", "b"])
@pytest.mark.parametrize(
    "changes",
    [
        {"image": "cd" * 32},
        {"function": "kernel_9"},
        {"grid": (131, 1, 1)},
        {"block": (64, 1, 1)},
        {"shared_bytes": 48},
        {"params": bytes(capture(0).nodes[0].params) + bytes(8)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_launch_that_differs_between_captures_is_refused(changes: Mapping[str, Any], where: str) -> None:
    captures = {"again": capture(0, nodes=2), "b": capture(1, nodes=2)}
    first, last = captures[where].nodes
    captures[where] = dataclasses.replace(captures[where], nodes=(first, dataclasses.replace(last, **changes)))
    message = refused(capture(0, nodes=2), captures["b"], captures["again"])
    assert message == "node 1 (kernel_1): its launch differs between captures of the same bucket"


def test_the_node_at_fault_is_named() -> None:
    message = refused(capture(0, nodes=3, edit=put("q_stride_h", 72)), capture(1, nodes=3))
    assert message.startswith("node 2 (kernel_2): field q_stride_h")


def test_parameters_shorter_than_the_struct_are_refused() -> None:
    captures = [
        dataclasses.replace(c, nodes=tuple(dataclasses.replace(n, params=n.params[:200]) for n in c.nodes))
        for c in (capture(0), capture(1))
    ]
    assert refused(*captures) == "node 0: 200 bytes of parameters, not podgraph's"


def test_regions_must_move_by_amounts_of_their_own() -> None:
    together = dataclasses.replace(capture(1), regions=places(BASES[1], 0))
    with pytest.raises(AssertionError, match="an amount of its own"):
        prove(capture(0), together)


@pytest.mark.parametrize(
    ("count", "edges", "order"),
    [
        (0, [], []),
        (3, [], [0, 1, 2]),
        (3, [(2, 1), (1, 0)], [2, 1, 0]),
        (4, [(3, 0), (3, 1), (0, 2), (1, 2)], [3, 0, 1, 2]),
        (3, [(2, 0)], [1, 2, 0]),
        (2, [(1, 0), (1, 0)], [1, 0]),
    ],
    ids=["empty", "no edges", "chain", "diamond", "lowest first", "edge given twice"],
)
def test_topological_order(count: int, edges: list[tuple[int, int]], order: list[int]) -> None:
    assert topological_order(count, edges) == order


@settings(deadline=None, derandomize=True, max_examples=100)
@given(order=st.permutations(range(7)), pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_topological_order_follows_every_edge(order: list[int], pairs: list[tuple[int, int]]) -> None:
    edges = [(order[min(pair)], order[max(pair)]) for pair in pairs if pair[0] != pair[1]]
    got = topological_order(7, edges)
    assert sorted(got) == list(range(7))
    assert all(got.index(source) < got.index(target) for source, target in edges)


@pytest.mark.parametrize("edges", [[(0, 0)], [(0, 1), (1, 0)], [(2, 0), (0, 1), (1, 0)]], ids=str)
def test_a_cycle_is_refused(edges: list[tuple[int, int]]) -> None:
    with pytest.raises(CaptureError, match="has a cycle"):
        topological_order(3, edges)


def test_unequal_numbers_of_nodes_are_refused() -> None:
    with pytest.raises(CaptureError, match="allowed: equal numbers"):
        prove(capture(0, nodes=1), capture(1, nodes=2))


def plan_capture(which: int) -> Capture:
    """The planner's two kernels, at one of the `BASES`."""
    sizes = {**dict.fromkeys(PLAN.pointers, 4096), **LAYOUT.sizes}
    regions, base = {}, BASES[which]
    for i, (name, size) in enumerate(sizes.items()):
        regions[name] = Place(base + 256 * which * i, size)
        base += size
    scalars = {name: (128, 1024)[which] * (i + 1) for i, name in enumerate(PLAN.scalars)}
    addresses = {name: place.address for name, place in regions.items()}
    params = bytes(fill_plan(SPEC, LAYOUT, Policy(ctas=16), (100, 1000), addresses, scalars))
    kernels = [KernelNode("ab" * 32, f"kernel_{i}", (1, 1, 1), (1024, 1, 1), 0, params) for i in range(2)]
    return Capture(tuple(kernels), regions, scalars)


def test_the_planner_is_relocated_like_every_other_kernel() -> None:
    a = plan_capture(0)
    relocated = relocate(a, a, plan_capture(1), PLAN, lambda address: address in DEVICE_MEMORY)
    assert {s.name for s in relocated.slots} == {*PLAN.pointers, *PLAN.scalars}
    expected = {Relocation(node, PLAN.offset_of(name), name, 0) for node in (0, 1) for name in PLAN.pointers}
    for array in LAYOUT.arrays.values():
        field = f"meta_{array.name}" if array.region == "meta" else array.name
        expected |= {Relocation(node, PLAN.offset_of(field), array.region, array.offset) for node in (0, 1)}
    assert set(relocated.relocations) == expected
    for node in relocated.nodes:
        assert node.params[: PLAN.offset_of("num_requests")] == bytes(PLAN.offset_of("num_requests"))
