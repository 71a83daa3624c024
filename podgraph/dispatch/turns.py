"""Whose turn it is: one call at a time, under the stream that was bound, in a thread that has the device's context."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from podgraph.dispatch.backends import DeviceBackend
from podgraph.errors import CudaError, PodgraphError

CLOSED = "this dispatcher is closed; bind the catalog again"
FORKED = (
    "this process was forked from the one that bound the catalog, and CUDA does not survive a fork: start it with the "
    "spawn method and bind there"
)
# What the driver goes on to answer once a kernel failed: the process has lost its context.
DEVICE_FAILURES = (
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
)

_alive: weakref.WeakSet[Turns] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: whatever was bound before is of no use there."""
    for turns in _alive:
        turns.unusable = FORKED


os.register_at_fork(after_in_child=_forked)


class _Thread(threading.local):
    """What a dispatcher knows of the calling thread: whether its device's context is current there."""

    entered = False


class Turns:
    """The calls of one dispatcher.

    A call that has to be quick looks itself: `take`, else `refuse`; `enter` where anything of ``unusable``,
    ``current_stream`` and ``thread`` is not as it should be; and `give` in the end. The others are in `one`.

    Attributes:
        unusable: why no call can be made any more; empty while they can.
        stream: that was bound.
        current_stream: torch's current one.
        thread: what is known of the calling thread.
        take, give: begin and end a turn without waiting; `take` says whether it could.
    """

    def __init__(self, backend: DeviceBackend | None) -> None:
        self._backend = backend
        self.unusable = ""
        self.stream = 0 if backend is None else backend.stream
        self.current_stream: Callable[[], int] = int if backend is None else _current_stream_of(backend.device)
        self.thread = _Thread()
        lock = threading.Lock()
        self.take: Callable[[], bool] = functools.partial(lock.acquire, False)
        self.give = lock.release
        _alive.add(self)

    @property
    def over(self) -> bool:
        """Whether nothing is left to close here."""
        return self.unusable in (CLOSED, FORKED)

    def refuse(self) -> NoReturn:
        """Says why there is no turn to take."""
        raise PodgraphError(
            self.unusable or "this dispatcher is in use in another thread; bind one for each thread, or take turns"
        )

    def enter(self) -> None:
        """What a call begins with that is not like the thread's last one.

        Raises:
            PodgraphError: it cannot be made now.
        """
        if self.unusable:
            raise PodgraphError(self.unusable)
        if self.current_stream() != self.stream:
            raise PodgraphError(
                "this dispatcher was bound to another stream than torch's current one: call it under "
                "torch.cuda.stream(...) with its device as current device, or bind one for each stream"
            )
        self._enter_thread()

    def _enter_thread(self) -> None:
        """A thread that torch has not used yet has no current context, and the driver would refuse it."""
        if not self.thread.entered:
            if self._backend is not None:
                self._backend.enter_thread()
            self.thread.entered = True

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """One call, whatever torch's current stream is."""
        if not self.take():
            self.refuse()
        try:
            if self.unusable:
                raise PodgraphError(self.unusable)
            self._enter_thread()
            yield
        finally:
            self.give()

    @contextlib.contextmanager
    def last(self) -> Iterator[None]:
        """The call that closes, also where the GPU failed before."""
        if not self.take():
            self.refuse()
        try:
            self.unusable = CLOSED
            self._enter_thread()
            yield
        finally:
            self.give()

    def fail(self, error: CudaError) -> None:
        """Where the device itself failed, nothing works any more."""
        if any(name in str(error) for name in DEVICE_FAILURES):
            self.unusable = f"this dispatcher is unusable since the GPU failed ({error}); start the process anew"


def _current_stream_of(device: torch.device) -> Callable[[], int]:
    """How to ask torch for its current stream on a device, quickly; 0 where there are no streams.

    With several GPUs, -1 where torch's current device is another one: the driver would launch there.
    """
    if device.type != "cuda":
        return int
    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if quick is None:

        def quick(index: int) -> int:
            return int(torch.cuda.current_stream(index).cuda_stream)

    if torch.cuda.device_count() > 1:
        current = torch.cuda.current_device
        return lambda: quick(device.index) if current() == device.index else -1
    return functools.partial(quick, device.index)
