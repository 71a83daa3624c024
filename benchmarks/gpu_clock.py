"""SM clock and power while something is timed. From NVML by ctypes: it comes with the driver, and needs no package."""

from __future__ import annotations

import ctypes
import statistics
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK = 1  # NVML_CLOCK_SM
PERIOD_S = 0.02

T = TypeVar("T")
Sample = tuple[float, float]  # MHz, W


class ClockLog:
    """Samples the current GPU in a thread.

    Attributes:
        problem: why nothing can be sampled; empty where it can.
        samples: of everything watched so far.
    """

    def __init__(self) -> None:
        self.problem = ""
        self.samples: list[Sample] = []
        try:
            self._nvml = ctypes.CDLL(LIBRARY)
            self._call("nvmlInit_v2")
            self._device = ctypes.c_void_p()
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device))
            self._sample()
        except OSError as e:
            self.problem = str(e)

    def watch(self, run: Callable[[], T]) -> tuple[T, dict[str, Any]]:
        """The result of a call, and what was sampled while it ran. NVML's power is an average over a second."""
        stop, samples = threading.Event(), list[Sample]()

        def follow() -> None:
            while not stop.wait(PERIOD_S):
                try:
                    samples.append(self._sample())
                except OSError as e:
                    self.problem = str(e)
                    return

        thread = threading.Thread(target=follow, daemon=True)
        if not self.problem:
            thread.start()
        try:
            result = run()
        finally:
            stop.set()
            if thread.ident is not None:
                thread.join()
        self.samples += samples
        return result, summary(samples)

    def _sample(self) -> Sample:
        clock, milliwatts = ctypes.c_uint(), ctypes.c_uint()
        self._call("nvmlDeviceGetClockInfo", self._device, SM_CLOCK, ctypes.byref(clock))
        self._call("nvmlDeviceGetPowerUsage", self._device, ctypes.byref(milliwatts))
        return float(clock.value), milliwatts.value / 1e3

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._nvml, name)(*args)
        if status != 0:
            raise OSError(f"{name}: NVML status {status}")


def summary(samples: list[Sample]) -> dict[str, Any]:
    """Least, median and largest SM clock and power."""
    columns = dict(zip(("sm_clock_mhz", "power_w"), zip(*samples, strict=True), strict=True)) if samples else {}
    return {
        "samples": len(samples),
        **{name: {"min": min(v), "median": statistics.median(v), "max": max(v)} for name, v in columns.items()},
    }
