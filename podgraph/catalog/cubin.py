"""What a cubin says of itself, read without a GPU: its architecture, its kernels and its constants.

A cubin is a 64-bit ELF file. Its header's flags hold the SM version; a kernel's code is the section ``.text.NAME``, its
attributes are ``.nv.info.NAME`` (as ``readelf`` and ``cuobjdump -elf`` show). Every offset is checked before use.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from podgraph.errors import CatalogError

ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SEGMENT = struct.Struct("<IIQQQQQQ")
SYMBOL = struct.Struct("<IBBHQQ")
SYMBOL_TABLE = 2  # a kind of section
NO_BITS = 8  # a section that takes no bytes of the file: zeros
EM_CUDA = 190
OBJECT = 1  # a kind of symbol: a variable
# attributes are (form, name, 16 bits): a value, or for this form the bytes that follow
SIZED_FORM = 4
PARAM_BYTES_NAME = 0x19  # EIATTR_CBANK_PARAM_SIZE
# Ours are far below; a damaged file could have a reader search or allocate for minutes.
MAX_NAME = 4096
MAX_SYMBOLS = 1 << 16
MAX_OBJECT_BYTES = 4096  # larger variables are left out


@dataclass(frozen=True)
class Cubin:
    """What a cubin says.

    Attributes:
        sm: SM version, 90 for compute capability 9.0.
        kernels: entry name -> bytes of parameters.
        constants: name -> initial bytes of each small variable.
    """

    sm: int
    kernels: dict[str, int]
    constants: dict[str, bytes]

    def uint32(self, name: str) -> int:
        """The value of a ``uint32_t``.

        Raises:
            CatalogError: there is none of that name and size.
        """
        data = self.constants.get(name, b"")
        if len(data) != 4:
            raise CatalogError(f"constant {name}: got {len(data)} bytes, expected 4")
        return int.from_bytes(data, "little")

    def text(self, name: str) -> str:
        """The value of a C string; empty where there is none of that name."""
        return self.constants.get(name, b"").rstrip(b"\0").decode("ascii", "replace")


def kernels(data: bytes) -> tuple[int, dict[str, int]]:
    """The SM version of a cubin, and the parameter bytes of each of its kernels; see `read`."""
    cubin = read(data)
    return cubin.sm, cubin.kernels


def read(data: bytes) -> Cubin:
    """Reads a cubin.

    Raises:
        CatalogError: it is no cubin, or a damaged one.
    """
    try:
        return _read(data)
    except (struct.error, IndexError, ValueError, OverflowError) as e:
        raise CatalogError(f"a damaged cubin: {e}") from None


def _read(data: bytes) -> Cubin:
    header = ELF_HEADER.unpack_from(data)
    ident, _, machine, _, _, segments_at, sections_at, flags, _, segment_size, segment_count, size, count, names = (
        header
    )
    if ident[:5] != b"\x7fELF\x02" or machine != EM_CUDA:
        raise CatalogError("not a cubin")
    if (count and size != SECTION.size) or (segment_count and segment_size != SEGMENT.size):
        raise CatalogError(f"a damaged cubin: sections and segments of {size} and {segment_size} bytes each")
    _check_end(data, sections_at + count * SECTION.size, segments_at + segment_count * SEGMENT.size)
    sections = [SECTION.unpack_from(data, sections_at + i * SECTION.size) for i in range(count)]
    segments = [SEGMENT.unpack_from(data, segments_at + i * SEGMENT.size) for i in range(segment_count)]
    _check_end(data, *(s[4] + s[5] for s in sections if s[1] != NO_BITS), *(s[2] + s[5] for s in segments))
    names_at = sections[names][4]
    named = {_name(data, names_at + s[0]): s for s in sections}
    found = [name.removeprefix(".text.") for name in named if name.startswith(".text.")]

    def info(name: str) -> bytes:
        section = named.get(f".nv.info.{name}")
        return b"" if section is None else data[section[4] : section[4] + section[5]]

    return Cubin(
        # the ABI of CUDA 13 (8) moved the SM version by a byte
        flags >> 8 & 0xFF if ident[8] >= 8 else flags & 0xFF,
        {name: _param_bytes(info(name)) for name in found},
        dict(_constants(data, sections)),
    )


def _check_end(data: bytes, *ends: int) -> None:
    """The driver does not look: it reads beyond the end of an image that is cut."""
    if max(ends, default=0) > len(data):
        raise CatalogError(f"a damaged cubin: {len(data)} bytes, it speaks of {max(ends)}")


def _constants(data: bytes, sections: list[tuple[int, ...]]) -> Iterator[tuple[str, bytes]]:
    for table in sections:
        if table[1] != SYMBOL_TABLE:
            continue
        if table[5] > MAX_SYMBOLS * SYMBOL.size:
            raise ValueError(f"{table[5]} bytes of symbols")
        names_at = sections[table[6]][4]
        for at in range(table[4], table[4] + table[5] - SYMBOL.size + 1, SYMBOL.size):
            name, info, _, index, value, size = SYMBOL.unpack_from(data, at)
            if info & 15 != OBJECT or size > MAX_OBJECT_BYTES or index >= len(sections):
                continue
            section = sections[index]
            if value + size > section[5]:  # in shared memory, say
                continue
            start = section[4] + value
            yield _name(data, names_at + name), bytes(size) if section[1] == NO_BITS else data[start : start + size]


def _name(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start, start + MAX_NAME)].decode("utf-8", "replace")


def _param_bytes(info: bytes) -> int:
    """Of a kernel's attributes; 0 where they do not say."""
    at = 0
    while at + 4 <= len(info):
        form, name, value = struct.unpack_from("<BBH", info, at)
        if name == PARAM_BYTES_NAME:
            return int(value)
        at += 4 + (value if form == SIZED_FORM else 0)
    return 0
