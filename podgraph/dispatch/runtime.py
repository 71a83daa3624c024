"""Opening a catalog, and binding it to a device."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from podgraph.catalog import fingerprint, static, store
from podgraph.catalog.model import Catalog, Fingerprint
from podgraph.dispatch.backends import Backend
from podgraph.dispatch.counters import Counters
from podgraph.dispatch.dispatcher import Dispatcher, OnMiss
from podgraph.dispatch.tensors import KVCache
from podgraph.errors import CatalogError, ConfigError
from podgraph.planner import Layout

logger = logging.getLogger("podgraph")


class OpenCatalog:
    """A catalog that was read and checked; nothing is on a device yet.

    Attributes:
        path: the file.
        content: everything it holds.
    """

    def __init__(self, path: Path, content: Catalog) -> None:
        self.path, self.content = path, content
        self._images: Any = None  # what dispatchers share on a GPU, made with the first
        self._proven: dict[str, Layout] | None = None  # by specification, once the content was checked

    def bind(
        self,
        spec: str | None = None,
        device: str | torch.device | None = None,
        stream: torch.cuda.Stream | int | None = None,
        on_miss: OnMiss = "split",
        padding_cap: float | None = None,
        kv_caches: Sequence[KVCache] = (),
        memory_budget: int | None = None,
        nvtx: bool = False,
    ) -> Dispatcher:
        """Loads one specification onto a device.

        Args:
            spec: name of the specification; may be left out where the catalog holds one.
            device: where q and the caches live; the current GPU, or the CPU for a ``cpu`` catalog.
            stream: the stream that everything goes to; the current one of the device. It must be torch's current
                stream whenever the dispatcher is called.
            on_miss: what `plan` does with a batch that no bucket holds: cut it for several replays, or raise.
            padding_cap: share of a bucket's rows, 0 to 1, that may stay empty; buckets beyond it are taken only where
                no other holds the batch (and with ``on_miss="error"`` not at all). None is no cap.
            kv_caches: every layer's cache, in the forms of `Dispatcher.run`, for ``run(q, layer=i)``: checked once, and
                each layer has executable graphs of its own, which are not patched from layer to layer.
            memory_budget: bytes of device memory for executable graphs; beyond it the least recently used ones go.
                None is no limit.
            nvtx: show plan and run as ranges in a profiler.

        Raises:
            ConfigError: an option is none of these, or nvtx is not installed.
            CatalogError: no such specification, or a template, image or capacity that is not what it must be.
            FingerprintMismatch: the catalog was built for another GPU or driver.
            BatchError: a cache does not fit the specification.
            CudaError: not enough device memory; nothing stays allocated.
        """
        if on_miss not in ("split", "error"):
            raise ConfigError(f"on_miss: got {on_miss!r}, allowed: 'split' or 'error'")
        if padding_cap is not None and not (isinstance(padding_cap, int | float) and 0 <= padding_cap <= 1):
            raise ConfigError(f"padding_cap: got {padding_cap!r}, allowed: 0 to 1, or None")
        if memory_budget is not None and not (isinstance(memory_budget, int) and memory_budget >= 0):
            raise ConfigError(f"memory_budget: got {memory_budget!r}, allowed: bytes, 0 or more, or None")
        if not isinstance(kv_caches, Sequence):
            raise ConfigError(f"kv_caches: got {type(kv_caches).__name__}, allowed: a list with every layer's cache")
        if device is not None:
            device = _device(device)
        name = self._spec_name(spec)
        content = self.content
        if content.fingerprint.backend == "cuda":
            gpu = self._find_gpu(device)
        elif device is None or device.type == "cpu":
            gpu = None
        else:
            raise CatalogError(f"{self.path}: device: got {device}, allowed: cpu (the catalog was built without a GPU)")
        layout, counters = self._layout(name), Counters()
        backend: Backend
        if gpu is None:
            backend = self._bind_cpu(name, layout)
        else:
            backend = self._bind_gpu(name, layout, gpu, stream, counters, memory_budget)
        try:
            dispatcher = _dispatcher_class(nvtx)(content, name, backend, counters, on_miss, padding_cap, kv_caches)
            self._log_bind(name, dispatcher, on_miss=on_miss, padding_cap=padding_cap, memory_budget=memory_budget)
            return dispatcher
        except BaseException:
            backend.close()
            raise

    def _log_bind(self, name: str, dispatcher: Dispatcher, **options: Any) -> None:
        """The one line that a bind logs; no handler is installed, so that it shows where the application wants it."""
        if not logger.isEnabledFor(logging.INFO):
            return
        records = self.content.buckets(name)
        logger.info(
            "bound %s: spec %s, device %s, %d buckets, %d templates, settings %s, %s, bytes %s",
            self.path,
            name,
            dispatcher.device,
            len(records),
            len({r.template for r in records if r.template >= 0}),
            "/".join(sorted({r.variant for r in records})),
            ", ".join(f"{option}={value}" for option, value in options.items()),
            ", ".join(f"{kind} {size:,}" for kind, size in dispatcher.memory().items()),
        )

    def _layout(self, name: str) -> Layout:
        """Where a specification's work lists lie. Whatever follows from something else was checked against it then."""
        try:
            if self._proven is None:
                self._proven = static.prove(self.content)
            return self._proven.get(name) or static.layout_of(self.content, name)
        except CatalogError as e:
            raise CatalogError(f"{self.path}: {e}") from None

    def _spec_name(self, spec: str | None) -> str:
        names = list(self.content.specs)
        if spec is None and len(names) == 1:
            return names[0]
        if spec not in names:
            raise CatalogError(f"{self.path}: spec: got {spec!r}, allowed: {', '.join(names)}; name one of them")
        return spec

    def _find_gpu(self, device: torch.device | None) -> torch.device:
        """The GPU to bind to, checked against the catalog's fingerprint."""
        from podgraph import driver

        chosen = torch.device("cuda") if device is None else device
        if chosen.type != "cuda":
            raise CatalogError(f"{self.path}: device: got {chosen}, allowed: a CUDA device (the catalog holds graphs)")
        driver.open_device(0)  # says so where there is none
        if not torch.cuda.is_available():
            raise CatalogError(
                f"{self.path}: torch {torch.__version__} cannot use this machine's GPU; install a CUDA build"
            )
        found = driver.open_device(torch.cuda.current_device() if chosen.index is None else chosen.index)
        fingerprint.compare(
            self.content.fingerprint,
            Fingerprint("cuda", found.compute_capability, found.sm_count, found.driver_version),
        )
        return torch.device("cuda", found.ordinal)

    def _bind_cpu(self, name: str, layout: Layout) -> Backend:
        from podgraph.dispatch.cpu import CpuBackend

        return CpuBackend(self.content, name, layout, self.content.policy(name))

    def _bind_gpu(
        self,
        name: str,
        layout: Layout,
        device: torch.device,
        stream: torch.cuda.Stream | int | None,
        counters: Counters,
        memory_budget: int | None,
    ) -> Backend:
        from podgraph.dispatch.gpu import GpuBackend
        from podgraph.dispatch.images import Images

        if stream is None:
            stream = torch.cuda.current_stream(device)
        handle = getattr(stream, "cuda_stream", stream)
        if not isinstance(handle, int):
            raise ConfigError(f"stream: got {stream!r}, allowed: a torch.cuda.Stream, its number, or None")
        if self._images is None:
            self._images = Images(self.content)
        return GpuBackend(self.content, name, layout, device, handle, self._images, counters, memory_budget)


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise ConfigError(f"device: got {device!r}, allowed: what torch.device takes, such as 'cuda:0'") from e


def _dispatcher_class(nvtx: bool) -> type[Dispatcher]:
    if not nvtx:
        return Dispatcher
    from podgraph.dispatch.nvtx import TracedDispatcher

    return TracedDispatcher


def open(path: str | Path) -> OpenCatalog:  # noqa: A001 (podgraph.open is the public name)
    """Reads and checks a catalog. Touches no GPU.

    Raises:
        CatalogError: the file is missing, damaged, or of another format version.
    """
    if not isinstance(path, str | os.PathLike):
        raise CatalogError(f"path: got {path!r}, allowed: the path of a catalog")
    return OpenCatalog(Path(path), store.read(path))
