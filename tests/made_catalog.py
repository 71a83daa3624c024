"""A catalog for a Hopper GPU without compiler and GPU: cubins that only say what they were compiled from."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping

from podgraph.catalog import cubin, expected
from podgraph.catalog.model import Catalog, Fingerprint, Record, Region, SpecEntry, Template
from podgraph.planner import Layout, Policy
from podgraph.planner.args import PLAN, RUN, params_of
from podgraph.providers import pod_sm90
from podgraph.providers.nvcc import IDENTITY
from podgraph.shapes import AttentionSpec, Bucket

SM_COUNT, ARCH = 132, "sm_90a"
BUCKETS = (Bucket(72, 1024, 64), Bucket(8, 512, 0), Bucket(32, 0, 32))
SPECS = {
    "hopper": AttentionSpec(32, 8, 128, 16),
    "several": AttentionSpec(16, 4, 128, 32, window_left=500, decode_rows=2),
    "small": AttentionSpec(8, 2, 64, 1, logits_soft_cap=30.0),  # which pod_sm90 does not serve
}
CONSTANTS = {"podgraph_smem_bytes": 65_536, "podgraph_smem_bytes_per_request": 40}


def make_cubin(kernels: Mapping[str, int], constants: Mapping[str, bytes], sm: int = 90) -> bytes:
    """An ELF file that says this, and holds no code.

    Args:
        kernels: entry name -> bytes of parameters.
    """
    sections: list[tuple[str, int, bytes, int]] = [("", 0, b"", 0)]  # name, kind, content, link
    for name, size in kernels.items():
        sections.append((f".text.{name}", 1, bytes(16), 0))
        sections.append((f".nv.info.{name}", 1, struct.pack("<BBH", 3, cubin.PARAM_BYTES_NAME, size), 0))
    names, symbols, values = b"\0", b"", b""
    variables = len(sections)
    for name, value in constants.items():
        symbols += cubin.SYMBOL.pack(len(names), cubin.OBJECT, 0, variables, len(values), len(value))
        names, values = names + name.encode() + b"\0", values + value
    sections += [
        (".nv.global.init", 1, values, 0),
        (".strtab", 3, names, 0),
        (".symtab", cubin.SYMBOL_TABLE, symbols, variables + 1),
    ]
    titles = b"".join(name.encode() + b"\0" for name, *_ in sections) + b".shstrtab\0"
    sections.append((".shstrtab", 3, titles, 0))
    body, table = b"", b""
    for name, kind, content, link in sections:
        at = titles.index(b"\0" + name.encode() + b"\0") + 1 if name else 0
        table += cubin.SECTION.pack(at, kind, 0, 0, 64 + len(body), len(content), link, 0, 1, 0)
        body += content
    ident = b"\x7fELF\x02\x01\x01\x41\x08".ljust(16, b"\0")
    header = cubin.ELF_HEADER.pack(
        *(ident, 2, cubin.EM_CUDA, 1, 0, 0, 64 + len(body), sm << 8, 64),
        *(cubin.SEGMENT.size, 0, cubin.SECTION.size, len(sections), len(sections) - 1),
    )
    return header + body + table


def make_image(kernel: expected.Kernel) -> bytes:
    """What compiling a kernel would give."""
    constants = {IDENTITY: kernel.source.identity.encode() + b"\0"}
    constants |= {name: struct.pack("<I", size) for name, size in CONSTANTS.items()}
    return make_cubin({kernel.function: params_of(kernel.function).size}, constants)


def setup_of(spec: AttentionSpec) -> expected.Setup:
    kernels = "flashinfer" if pod_sm90.refusal(spec, ARCH) else "sm90"
    policy = Policy.for_sms(SM_COUNT, kernels)
    return expected.Setup(spec, Layout.of(spec, BUCKETS, policy), policy, SM_COUNT, ARCH)


def make_catalog(specs: Mapping[str, AttentionSpec] = SPECS, max_pages: int = 4096) -> Catalog:
    """Each bucket in each of its variants, as before a build verifies them."""
    images: dict[str, bytes] = {}
    templates: dict[Template, int] = {}
    entries, records = {}, []

    def add(graph: expected.Graph) -> int:
        found = []
        for kernel in graph.kernels:
            data = make_image(kernel)
            digest = hashlib.sha256(data).hexdigest()
            images[digest] = data
            found.append((digest, cubin.read(data)))
        return templates.setdefault(expected.template_of(graph, found), len(templates))

    for name, spec in specs.items():
        setup = setup_of(spec)
        planner = add(expected.planner_graph(setup, max_pages, 65_536))
        for bucket in BUCKETS:
            for variant in expected.variants_of(spec, setup.policy.kernels, ARCH, bucket):
                records.append(Record(name, bucket, variant, add(expected.attention_graph(setup, bucket, variant))))
        sizes = dict.fromkeys((*RUN.pointers, *PLAN.pointers), 0) | setup.layout.sizes
        regions = tuple(Region(*region) for region in sorted(sizes.items()))
        entries[name] = SpecEntry(spec, regions, setup.layout.capacity, planner)
    fingerprint = Fingerprint("cuda", "9.0", SM_COUNT, 13000)
    return Catalog(fingerprint, entries, max_pages, 65_536, tuple(templates), tuple(records), images, {})
