"""What a cubin says of itself, read without a GPU: its architecture, its kernels and the bytes of their parameters.

A cubin is a 64-bit ELF file. Its header's flags hold the SM version; a kernel's code is the section ``.text.NAME``, its
attributes are ``.nv.info.NAME`` (as ``readelf`` and ``cuobjdump -elf`` show). Every offset is checked before use.
"""

from __future__ import annotations

import struct

from podgraph.errors import CatalogError

ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SEGMENT = struct.Struct("<IIQQQQQQ")
NO_BITS = 8  # a section that takes no bytes of the file
EM_CUDA = 190
# attributes are (form, name, 16 bits): a value, or for this form the bytes that follow
SIZED_FORM = 4
PARAM_BYTES_NAME = 0x19  # EIATTR_CBANK_PARAM_SIZE


def kernels(data: bytes) -> tuple[int, dict[str, int]]:
    """The SM version of a cubin, 90 for compute capability 9.0, and the parameter bytes of each of its kernels.

    Raises:
        CatalogError: it is no cubin, or a damaged one.
    """
    try:
        header = ELF_HEADER.unpack_from(data)
        ident, _, machine, _, _, segments_at, sections_at, flags, _, _, segment_count, _, count, names_index = header
        if ident[:5] != b"\x7fELF\x02" or machine != EM_CUDA:
            raise CatalogError("not a cubin")
        sections = [SECTION.unpack_from(data, sections_at + i * SECTION.size) for i in range(count)]
        segments = [SEGMENT.unpack_from(data, segments_at + i * SEGMENT.size) for i in range(segment_count)]
        # the driver does not look: it reads beyond the end of an image that is cut
        ends = [s[4] + s[5] for s in sections if s[1] != NO_BITS] + [s[2] + s[5] for s in segments]
        if max(ends, default=0) > len(data):
            raise CatalogError(f"a damaged cubin: {len(data)} bytes, it speaks of {max(ends)}")
        names_at = sections[names_index][4]
        named = {_name(data, names_at + s[0]): data[s[4] : s[4] + s[5]] for s in sections}
    except (struct.error, IndexError, ValueError) as e:
        raise CatalogError(f"a damaged cubin: {e}") from None
    found = [name.removeprefix(".text.") for name in named if name.startswith(".text.")]
    # the ABI of CUDA 13 (8) moved the SM version by a byte
    return flags >> 8 & 0xFF if ident[8] >= 8 else flags & 0xFF, {
        name: _param_bytes(named.get(f".nv.info.{name}", b"")) for name in found
    }


def _name(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode("utf-8", "replace")


def _param_bytes(info: bytes) -> int:
    """Of a kernel's attributes; 0 where they do not say."""
    at = 0
    while at + 4 <= len(info):
        form, name, value = struct.unpack_from("<BBH", info, at)
        if name == PARAM_BYTES_NAME:
            return int(value)
        at += 4 + (value if form == SIZED_FORM else 0)
    return 0
