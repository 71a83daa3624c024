"""Device memory of a set of buckets: graphs, and what all of them share, counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from podgraph.catalog.model import Catalog
from podgraph.planner import Layout, Policy
from podgraph.shapes import AttentionSpec, Bucket
from podgraph.workload.costs import Scope
from podgraph.workload.profile import DeviceProfile

# An estimate: kernel images of one specification, up to three prefill tiles, decode and merge, of 104 KB or less each.
IMAGE_BYTES = 4 * 104_000
# An estimate: kernels of one layer, four products, five in between, and attention's four nodes.
NODES_PER_LAYER = 13


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory.

    Attributes:
        dedicated_bytes: of a bucket with a graph exec of its own.
        shared_bytes: of a bucket that shares one.
        region_bytes: work lists and partial results, once.
        image_bytes: kernels, once.
        modelled: whether graphs and images are estimates.
    """

    dedicated_bytes: int
    shared_bytes: int
    region_bytes: int
    image_bytes: int
    modelled: bool

    @property
    def once_bytes(self) -> int:
        """What does not depend on the number of buckets."""
        return self.region_bytes + self.image_bytes

    def total(self, buckets: int, shared: bool = False) -> int:
        """Of a set of so many buckets."""
        return self.once_bytes + buckets * (self.shared_bytes if shared else self.dedicated_bytes)


def memory_of(
    specs: Sequence[AttentionSpec], buckets: Iterable[Bucket], device: DeviceProfile, scope: Scope, num_layers: int
) -> Memory:
    """The memory of a set that is not built yet.

    Regions are those of podgraph's layout for the largest of the buckets. In scope ``step`` a bucket is a graph of the
    whole model, which shares nothing but its memory pool.
    """
    shapes = tuple(buckets)
    policy = Policy.for_sms(device.sm_count)
    regions = sum(sum(Layout.of(spec, shapes, policy).sizes.values()) for spec in specs)
    dedicated = device.dedicated_bytes * len(specs)
    shared = device.shared_bytes * len(specs)
    if scope == "step":
        dedicated = shared = num_layers * NODES_PER_LAYER * device.node_bytes
    return Memory(dedicated, shared, regions, IMAGE_BYTES * len(specs), modelled=True)


def memory_of_catalog(catalog: Catalog, device: DeviceProfile) -> Memory:
    """The memory of a built catalog: regions and images as they are, execs as measured on the profile's device."""
    regions = sum(region.size for entry in catalog.specs.values() for region in entry.regions)
    return Memory(
        dedicated_bytes=device.dedicated_bytes * len(catalog.specs),
        shared_bytes=device.shared_bytes * len(catalog.specs),
        region_bytes=regions,
        image_bytes=sum(map(len, catalog.images.values())),
        modelled=False,
    )
