"""podgraph: catalogs of CUDA graphs of POD attention, compiled ahead of time, replayed in a serving process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from podgraph.errors import PodgraphError
from podgraph.shapes import AttentionSpec, Bucket

if TYPE_CHECKING:
    from podgraph.dispatch.dispatcher import Dispatcher
    from podgraph.dispatch.runtime import OpenCatalog, open  # noqa: A004
    from podgraph.dispatch.two_sided import TwoSided

__version__ = "0.1.0"
__all__ = ["AttentionSpec", "Bucket", "Dispatcher", "OpenCatalog", "PodgraphError", "TwoSided", "__version__", "open"]


def __getattr__(name: str) -> Any:
    """The runtime needs torch: it is imported when it is first asked for."""
    if name in ("open", "OpenCatalog"):
        from podgraph.dispatch import runtime

        return getattr(runtime, name)
    if name == "Dispatcher":
        from podgraph.dispatch.dispatcher import Dispatcher

        return Dispatcher
    if name == "TwoSided":
        from podgraph.dispatch.two_sided import TwoSided

        return TwoSided
    raise AttributeError(f"module 'podgraph' has no attribute {name!r}")
