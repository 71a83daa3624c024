"""Descriptors of KV caches: one entry a cache, at an address that stays; what TMA is told about each layout."""

from __future__ import annotations

import ctypes
import itertools
import struct
from typing import Any

import pytest
import torch

from podgraph import driver
from podgraph.dispatch import kv_maps
from podgraph.dispatch.kv_maps import BLOCK_ENTRIES, ENTRY_BYTES, KvMaps
from podgraph.dispatch.tensors import Cache
from podgraph.errors import BatchError, PodgraphError
from podgraph.shapes import AttentionSpec

SPEC = AttentionSpec(8, 2, 128, 16)
STREAM = 7


class Device:
    """What the driver was asked for."""

    def __init__(self) -> None:
        self.memory: dict[int, bytes] = {}
        self.blocks = itertools.count(1 << 32, 1 << 20)
        self.maps: list[tuple[Any, ...]] = []


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()

    class Memory:
        def __init__(self, size: int) -> None:
            assert size == BLOCK_ENTRIES * ENTRY_BYTES
            self.address = next(found.blocks)

        def close(self) -> None:
            self.address = 0

    def copy(target: int, source: int, size: int, stream: int) -> None:
        assert stream == STREAM
        found.memory[target] = ctypes.string_at(source, size)

    def tensor_map(*arguments: Any) -> bytes:
        found.maps.append(arguments)
        return struct.pack("<Q", arguments[0]).ljust(128, b"m")

    monkeypatch.setattr(driver, "Memory", Memory)
    monkeypatch.setattr(driver, "copy_to_device", copy)
    monkeypatch.setattr(driver, "tensor_map", tensor_map)
    return found


def caches(count: int, pages: int = 3) -> list[Cache]:
    pool = torch.zeros(count, pages, 2, 16, 2, 128, dtype=torch.bfloat16)
    return [Cache(SPEC, c[:, 0], c[:, 1]) for c in pool]


def test_each_cache_has_one_entry_that_stays(device: Device) -> None:
    maps, calls = KvMaps(SPEC), caches(BLOCK_ENTRIES + 3)
    first = [maps.address_of(c, STREAM, False) for c in calls]
    assert len(set(first)) == len(calls) == len(device.memory)
    assert all(b - a == ENTRY_BYTES for a, b in itertools.pairwise(first[:BLOCK_ENTRIES]))
    copies = dict(device.memory)
    assert [maps.address_of(c, STREAM, False) for c in calls] == first
    assert device.memory == copies
    assert all(len(entry) == ENTRY_BYTES for entry in copies.values())
    maps.close()


def test_an_entry_names_its_own_tensors(device: Device) -> None:
    (one,) = caches(1)
    entry = device.memory[KvMaps(SPEC).address_of(one, STREAM, False)]
    for tensor, half in ((one.k, entry[:384]), (one.v, entry[384:])):
        for at in (0, 128):
            assert struct.unpack_from("<Q", half, at) == (tensor.data_ptr(),)
        assert struct.unpack_from("<3i", half, 256) == (2, 0, 1)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_what_tma_is_told(device: Device, layout: str) -> None:
    """Reading by the descriptor's sizes and strides, at the kernel's coordinates, finds each token of each head."""
    spec = AttentionSpec(8, 2, 128, 32, kv_layout=layout)
    shape = (5, 32, 2, 128) if layout == "NHD" else (5, 2, 32, 128)
    k = torch.arange(5 * 32 * 2 * 128, dtype=torch.int32).reshape(shape)
    raw = k.flatten()
    typed = k.to(torch.bfloat16)
    KvMaps(spec).address_of(Cache(spec, typed, typed), STREAM, False)
    entry = next(iter(device.memory.values()))
    head_c2, head_c4, page_c4 = struct.unpack_from("<3i", entry, 256)
    (_, _, sizes, strides, box, _), *_ = device.maps
    assert box == (64, 8, 2, 2, 1)
    for page, token, head, half in ((0, 0, 0, 0), (4, 31, 1, 1), (2, 17, 1, 0), (3, 8, 0, 1)):
        coordinates = (5, token % 8, head * head_c2 + half, token // 8, head * head_c4 + page * page_c4)
        assert all(c < size for c, size in zip(coordinates, sizes, strict=True))
        at = coordinates[0] + sum(c * s for c, s in zip(coordinates[1:], strides, strict=True)) // 2
        want = k[page, token, head] if layout == "NHD" else k[page, head, token]
        assert raw[at] == want[64 * half + 5]


def test_strides_that_tma_cannot_follow_are_refused(device: Device) -> None:
    spec = AttentionSpec(8, 2, 128, 16)
    wide = torch.zeros(4 * (16 * 2 * 192 + 64), dtype=torch.bfloat16)
    k = wide.as_strided((4, 16, 2, 128), (16 * 2 * 192 + 64, 2 * 192, 192, 1))
    with pytest.raises(BatchError, match=r"K cache: got strides .*, allowed: heads next to each other"):
        KvMaps(spec).address_of(Cache(spec, k, k), STREAM, False)


def test_a_new_cache_during_a_capture_is_refused(device: Device) -> None:
    maps, (one, two) = KvMaps(SPEC), caches(2)
    address = maps.address_of(one, STREAM, False)
    assert maps.address_of(one, STREAM, True) == address
    with pytest.raises(PodgraphError, match="this cache is new, and the stream is captured"):
        maps.address_of(two, STREAM, True)


def test_a_full_table_starts_over_unless_it_was_captured(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_maps, "MAX_ENTRIES", 70)
    calls = caches(200)
    maps = KvMaps(SPEC)
    for c in calls:
        address = maps.address_of(c, STREAM, False)
        assert struct.unpack_from("<Q", device.memory[address]) == (c.k.data_ptr(),)
    assert len(device.memory) == 70, "blocks are used again"
    maps.address_of(calls[-1], STREAM, True)
    there = [maps.address_of(c, STREAM, False) for c in calls[140:]]  # what the table still holds
    assert len(set(there)) == 60
    more = iter(calls)
    with pytest.raises(PodgraphError, match="more than 70 different caches, and some were captured"):
        all(maps.address_of(c, STREAM, False) for c in more)
