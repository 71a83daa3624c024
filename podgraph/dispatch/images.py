"""The kernel images of one open catalog, loaded once for all of its dispatchers."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from podgraph import driver
from podgraph.catalog import cubin
from podgraph.catalog.model import Catalog


class Images:
    """Loads an image when the first dispatcher needs it, and lets it go with the last one.

    A loaded image serves every device of the process, and any thread.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._loaded: dict[str, driver.Image] = {}
        self._users: dict[str, int] = {}
        self._lock = threading.Lock()

    def acquire(self, templates: Iterable[int]) -> Loaded:
        """The images of some templates, until `Loaded.close`.

        Raises:
            CudaError: the driver does not take one of them. None stays loaded then for this caller.
            CatalogError: an image is damaged.
        """
        loaded = Loaded(self)
        try:
            with self._lock:
                for digest in {node.image for index in templates for node in self._catalog.templates[index].nodes}:
                    if digest not in self._loaded:
                        cubin.kernels(self._catalog.images[digest])  # one that is cut would crash the driver
                        self._loaded[digest] = driver.Image(self._catalog.images[digest])
                        self._users[digest] = 0
                    self._users[digest] += 1
                    loaded.by_digest[digest] = self._loaded[digest]
        except BaseException:
            loaded.close()
            raise
        return loaded

    def release(self, digests: Iterable[str]) -> None:
        with self._lock:
            for digest in digests:
                self._users[digest] -= 1
                if self._users[digest] == 0:
                    self._loaded.pop(digest).close()


class Loaded:
    """What one dispatcher uses of the images."""

    def __init__(self, images: Images) -> None:
        self._images = images
        self.by_digest: dict[str, driver.Image] = {}

    def close(self) -> None:
        self._images.release(self.by_digest)
        self.by_digest = {}
