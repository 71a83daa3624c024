"""A driver that only captures: it gives back just what was launched, so that a build gets as far as verification."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from podgraph import driver
from podgraph.catalog import cubin


class CapturingDriver:
    """Stands in for the driver of a Hopper GPU.

    Attributes:
        loaded: images that are loaded now.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sm_count: int) -> None:
        self.loaded = 0
        bases, handles = itertools.count(0x7F00_0000_0000, 1 << 32), itertools.count(1)
        names: dict[int, str] = {}
        sizes: dict[int, int] = {}  # of live memory, by address
        fake = self

        class Memory:
            def __init__(self, size: int) -> None:
                self.address = next(bases)
                sizes[self.address] = size

            def close(self) -> None:
                del sizes[self.address]

        class Image:
            def __init__(self, data: bytes) -> None:
                self._kernels = cubin.kernels(data)[1]
                fake.loaded += 1

            def function(self, name: str, shared_bytes: int, params_bytes: int) -> int:
                assert self._kernels[name] == params_bytes
                handle = next(handles)
                names[handle] = name
                return handle

            def close(self) -> None:
                fake.loaded -= 1

        class Graph:
            def __init__(self, launches: Sequence[driver.Launch]) -> None:
                self._launches = launches

            @classmethod
            def capture(cls, launches: Sequence[driver.Launch]) -> Graph:
                return cls(launches)

            def describe(self) -> tuple[list[driver.NodeInfo], list[tuple[int, int, bytes]]]:
                nodes = [
                    driver.NodeInfo(
                        driver.GRAPH_KERNEL_NODE,
                        launch.function,
                        names[launch.function],
                        launch.grid,
                        launch.block,
                        launch.shared_bytes,
                        (launch.params,),
                    )
                    for launch in self._launches
                ]
                return nodes, [(i, i + 1, bytes(8)) for i in range(len(nodes) - 1)]

            def close(self) -> None:
                pass

        def is_device_address(word: int) -> bool:
            return any(address <= word < address + size for address, size in sizes.items())

        monkeypatch.setattr(driver, "open_device", lambda i=0: driver.Device(i, "a Hopper", "9.0", sm_count, 13000))
        monkeypatch.setattr(driver, "is_device_address", is_device_address)
        for made in (Memory, Image, Graph):
            monkeypatch.setattr(driver, made.__name__, made)
