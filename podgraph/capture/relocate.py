"""Proves which parameter words of a captured graph are addresses, and of what.

The same launches are captured three times: at base addresses A, at A again, and at B, where every region and every
scalar that is set by name has moved by an amount of its own. A word that moved must have moved by exactly its region's
amount; a byte that differs between A and A is garbage; a word that did not move must not be a device address.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from podgraph.catalog.model import KernelNode, Relocation, Slot
from podgraph.errors import CaptureError
from podgraph.planner.args import ParamStruct

WORD = 8


@dataclass(frozen=True)
class Place:
    """Where a region lies in one capture: address and bytes."""

    address: int
    size: int


@dataclass(frozen=True)
class Capture:
    """One capture: its kernel nodes with all their parameter bytes, and what they were launched with."""

    nodes: tuple[KernelNode, ...]
    regions: Mapping[str, Place]
    scalars: Mapping[str, int]


@dataclass(frozen=True)
class Relocated:
    """Nodes whose relocated and settable words are zero, with the tables that fill them again."""

    nodes: tuple[KernelNode, ...]
    relocations: tuple[Relocation, ...]
    slots: tuple[Slot, ...]


def relocate(
    a: Capture, again: Capture, b: Capture, takes: ParamStruct, is_device_address: Callable[[int], bool]
) -> Relocated:
    """Compares three captures of the same launches.

    Args:
        takes: the struct that every node takes.
        is_device_address: whether a 64-bit word is device memory, by the driver.

    Raises:
        CaptureError: naming node, kernel and offset of a word that cannot be explained.
    """
    _check_distinct_shifts(a, b)
    counts = [len(capture.nodes) for capture in (a, again, b)]
    if len(set(counts)) != 1:
        raise CaptureError(f"captures of the same bucket have {counts} nodes, allowed: equal numbers")
    nodes, relocations, slots = [], [], []
    for index, (node, node_again, node_b) in enumerate(zip(a.nodes, again.nodes, b.nodes, strict=True)):
        if _launch(node) != _launch(node_again) or _launch(node) != _launch(node_b):
            raise CaptureError(
                f"node {index} ({node.function}): its launch differs between captures of the same bucket"
            )
        params, found = _relocate_node(index, node, node_again, node_b, a, b, takes, is_device_address)
        for slot in _slots(index, takes, len(params)):
            _prove_slot(slot, takes, node, node_b, a, b, found)
            slots.append(slot)
            params[slot.offset : slot.offset + slot.size] = bytes(slot.size)
        relocations += found
        nodes.append(KernelNode(node.image, node.function, node.grid, node.block, node.shared_bytes, bytes(params)))
    return Relocated(tuple(nodes), tuple(relocations), tuple(slots))


def _launch(node: KernelNode) -> tuple[object, ...]:
    return node.image, node.function, node.grid, node.block, node.shared_bytes, len(node.params)


def _check_distinct_shifts(a: Capture, b: Capture) -> None:
    shifts = [b.regions[name].address - place.address for name, place in a.regions.items()]
    assert len({0, *shifts}) == len(shifts) + 1, "every region must move by an amount of its own"


def _relocate_node(
    index: int,
    node: KernelNode,
    node_again: KernelNode,
    node_b: KernelNode,
    a: Capture,
    b: Capture,
    takes: ParamStruct,
    is_device_address: Callable[[int], bool],
) -> tuple[bytearray, list[Relocation]]:
    params, found = bytearray(node.params), []
    in_slot = {
        byte for slot in _slots(index, takes, len(params)) for byte in range(slot.offset, slot.offset + slot.size)
    }
    garbage = {i for i, (x, y) in enumerate(zip(node.params, node_again.params, strict=True)) if x != y}
    if garbage & in_slot:
        raise CaptureError(
            f"node {index} ({node.function}): a named field differs between two captures of the same launch"
        )
    for i in garbage:  # the driver copies whatever the stack held into struct padding
        params[i] = 0
    for offset in range(0, len(params) - WORD + 1, WORD):
        where = f"node {index} ({node.function}), parameter offset {offset}"
        window = range(offset, offset + WORD)
        word, moved = (struct.unpack_from("<Q", p, offset)[0] for p in (node.params, node_b.params))
        if garbage & set(window):
            continue
        if word == moved:
            if is_device_address(word):
                raise CaptureError(f"{where}: {word:#x} is a device address that belongs to no region")
            continue
        if all(i in in_slot for i in window) and _is_scalar_word(takes, offset):
            continue
        regions = [
            name
            for name, place in a.regions.items()
            if b.regions[name].address - place.address == moved - word and 0 <= word - place.address <= place.size
        ]
        if len(regions) != 1:
            raise CaptureError(f"{where}: {word:#x} moved by {moved - word:#x}, which is no region's own shift")
        found.append(Relocation(index, offset, regions[0], word - a.regions[regions[0]].address))
        params[offset : offset + WORD] = bytes(WORD)
    return params, found


def _is_scalar_word(takes: ParamStruct, offset: int) -> bool:
    return any(offset <= takes.offset_of(name) < offset + WORD for name in takes.scalars)


def _slots(node: int, takes: ParamStruct, params_bytes: int) -> Iterable[Slot]:
    """The fields that the runtime sets by name."""
    for name, (offset, size) in takes.slots.items():
        if offset + size > params_bytes:
            raise CaptureError(f"node {node}: {params_bytes} bytes of parameters, not podgraph's")
        yield Slot(name, node, offset, size)


def _prove_slot(
    slot: Slot,
    takes: ParamStruct,
    node: KernelNode,
    node_b: KernelNode,
    a: Capture,
    b: Capture,
    found: list[Relocation],
) -> None:
    """A pointer slot must be its region's address, a scalar slot must hold its scalar, in both captures."""
    if slot.name in takes.pointers:
        if Relocation(slot.node, slot.offset, slot.name, 0) not in found:
            raise CaptureError(f"node {slot.node} ({node.function}): field {slot.name} does not follow its region")
        return
    for params, scalars in ((node.params, a.scalars), (node_b.params, b.scalars)):
        got = int.from_bytes(params[slot.offset : slot.offset + slot.size], "little")
        if got != scalars[slot.name]:
            raise CaptureError(
                f"node {slot.node} ({node.function}): field {slot.name} holds {got}, launched with {scalars[slot.name]}"
            )
