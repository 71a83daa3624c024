"""What can be proven about a catalog without the GPU that it was built for.

Reading a file already checks every count, offset and digest. Here its parts are held against each other and against
this version of podgraph: regions and capacities against the planner, images against what they say of themselves, and
every template whole against what it must be (podgraph/catalog/expected.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from podgraph.catalog import cubin, expected
from podgraph.catalog.cubin import Cubin
from podgraph.catalog.model import Catalog, Template
from podgraph.errors import CatalogError
from podgraph.planner import Capacity, Layout, kernels_of
from podgraph.providers.nvcc import ARCHITECTURES, IDENTITY

# by what each was compiled from: its name in the catalog, and its content
Images = Mapping[str, tuple[str, Cubin]]


def layout_of(catalog: Catalog, name: str) -> Layout:
    """Where a specification's work lists lie, checked against what this version of podgraph would plan into them.

    Raises:
        CatalogError: another version of podgraph, or nobody, would have made these regions.
    """
    entry = catalog.specs[name]
    if not catalog.buckets(name):
        raise CatalogError(f"spec {name}: holds no bucket, none of it verified: rebuild the catalog")
    policy = catalog.policy(name)
    _check_variants(catalog, name)
    layout = Layout.for_capacity(entry.attention, entry.capacity, policy.kernels)
    regions = {r.name: r.size for r in entry.regions}
    for region, size in layout.sizes.items():
        if regions.get(region) != size:
            raise CatalogError(
                f"spec {name}: region {region} has {regions.get(region)} bytes, this podgraph plans {size}: "
                "rebuild the catalog"
            )
    for record in catalog.buckets(name):
        needs = Capacity.of(record.bucket, entry.attention, policy)
        if not entry.capacity.holds(needs):
            raise CatalogError(
                f"spec {name}: bucket {record.bucket} needs {needs}, the catalog has {entry.capacity}: "
                "rebuild the catalog"
            )
    return layout


def _check_variants(catalog: Catalog, name: str) -> None:
    """Each bucket is computed in a way that this version knows for it, all in ways of the same kernels."""
    attention, kernels = catalog.specs[name].attention, catalog.policy(name).kernels
    cpu = catalog.fingerprint.backend == "cpu"
    arch = "" if cpu else _arch(catalog)
    for record in catalog.buckets(name):
        if kernels_of(record.variant) != kernels:
            raise CatalogError(f"spec {name}: variant {record.variant}, allowed: those of {kernels} kernels only")
        allowed = ("interpreter",) if cpu else expected.variants_of(attention, kernels, arch, record.bucket)
        if record.variant not in allowed:
            raise CatalogError(
                f"spec {name}: variant {record.variant}, allowed: {', '.join(allowed) or f'no {kernels} kernels'}: "
                "rebuild the catalog"
            )


def _arch(catalog: Catalog) -> str:
    capability = catalog.fingerprint.compute_capability
    if capability not in ARCHITECTURES:
        raise CatalogError(f"fingerprint.compute_capability: got {capability}, allowed: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[capability]


def prove(catalog: Catalog) -> dict[str, Layout]:
    """Proves a catalog as far as that is possible without its GPU.

    Returns:
        The layout of each specification that has buckets.

    Raises:
        CatalogError: naming the specification, template, node or image that does not hold.
    """
    layouts = {name: layout_of(catalog, name) for name in catalog.specs if catalog.buckets(name)}
    if catalog.fingerprint.backend == "cpu":
        return layouts
    images = _images(catalog)
    for name, layout in layouts.items():
        _check_templates(catalog, name, layout, images)
    first: dict[Template, int] = {}
    for index, template in enumerate(catalog.templates):
        if first.setdefault(template, index) != index:
            raise CatalogError(f"templates[{index}]: the same as templates[{first[template]}], allowed: each once")
    return layouts


def check(catalog: Catalog) -> list[str]:
    """Like `prove`, and says what was proven."""
    layouts = prove(catalog)
    proven = [f"{len(layouts)} specifications: regions and capacities are those that this podgraph plans for"]
    if catalog.templates:
        proven += [
            f"{len(catalog.images)} images: each kernel is there, compiled for this GPU and these specifications",
            f"{len(catalog.templates)} graphs: every node, parameter, edge, relocation and slot is as it must be",
        ]
    return proven


def _images(catalog: Catalog) -> Images:
    wanted = int(_arch(catalog)[len("sm_") :].rstrip("a"))
    found: dict[str, tuple[str, Cubin]] = {}
    for digest, data in catalog.images.items():
        try:
            image = cubin.read(data)
        except CatalogError as e:
            raise CatalogError(f"image {digest[:12]}: {e}: rebuild the catalog") from None
        if image.sm != wanted:
            raise CatalogError(
                f"image {digest[:12]}: compiled for SM {image.sm}, the catalog's GPU is SM {wanted}: "
                "rebuild the catalog"
            )
        identity = image.text(IDENTITY)
        if not identity:
            raise CatalogError(
                f"image {digest[:12]}: got no {IDENTITY}, expected one: made by an older podgraph, or not by podgraph: "
                "rebuild the catalog"
            )
        if identity in found:
            raise CatalogError(
                f"image {digest[:12]}: compiled from the same as {found[identity][0][:12]}, allowed: one"
            )
        found[identity] = digest, image
    return found


def _check_templates(catalog: Catalog, name: str, layout: Layout, images: Images) -> None:
    """The templates that a specification uses: one for each of its variants, and its planner's."""
    entry, policy = catalog.specs[name], catalog.policy(name)
    setup = expected.Setup(entry.attention, layout, policy, catalog.fingerprint.sm_count, _arch(catalog))
    graphs: dict[str, tuple[int, expected.Graph]] = {}
    for index, record in enumerate(catalog.records):
        if record.spec != name:
            continue
        if record.variant not in graphs:
            graphs[record.variant] = record.template, expected.attention_graph(setup, record.bucket, record.variant)
        if record.template != graphs[record.variant][0]:
            raise CatalogError(
                f"records[{index}].template: got {record.template}, expected {graphs[record.variant][0]}: one template "
                f"for spec {name} in variant {record.variant}"
            )
    planner = expected.planner_graph(setup, catalog.max_pages, catalog.max_kv_len)
    for index, graph in (*graphs.values(), (entry.planner, planner)):
        _check_template(catalog, index, graph, images)


def _check_template(catalog: Catalog, index: int, graph: expected.Graph, images: Images) -> None:
    template, where = catalog.templates[index], f"templates[{index}]"
    try:
        found = [_image_of(template, number, kernel, images) for number, kernel in enumerate(graph.kernels)]
        wrong = expected.difference(template, expected.template_of(graph, found))
    except CatalogError as e:
        raise CatalogError(f"{where}.{e}: rebuild the catalog") from None
    if wrong:
        raise CatalogError(f"{where}.{wrong}: rebuild the catalog")


def _image_of(template: Template, number: int, kernel: expected.Kernel, images: Images) -> tuple[str, Cubin]:
    """The image that was compiled from what a node needs."""
    if kernel.source.identity not in images:
        own = template.nodes[number].image if number < len(template.nodes) else ""
        says = next((identity for identity, (digest, _) in images.items() if digest == own), "nothing")
        raise CatalogError(
            f"nodes[{number}].image: got one compiled from {says[:12]}, expected {kernel.source.identity[:12]}, "
            f"{kernel.source.file} for this specification and variant"
        )
    return images[kernel.source.identity]
