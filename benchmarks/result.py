"""The form of every result file: {device, driver (of a GPU), versions, commit, date, command, metrics}."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import podgraph

FOLDER = Path(__file__).resolve().parent / "results"
GPU_PACKAGES = ("torch", "cuda-bindings", "flashinfer-python", "numpy")
CPU_PACKAGES = ("numpy", "scipy", "polars")


def write_result(name: str, commit: str, metrics: dict[str, Any], module: str | None = None) -> Path:
    """Writes ``benchmarks/results/<name>.json`` for the current GPU and returns its path.

    Args:
        module: the benchmark's module, where it is not called like its result.
    """
    import torch

    from podgraph import driver

    device = driver.open_device(torch.cuda.current_device())
    where = {"device": device.name, "driver": device.driver_version}
    return _write(name, where, GPU_PACKAGES, commit, module or name, metrics)


def write_cpu_result(name: str, commit: str, metrics: dict[str, Any], module: str) -> Path:
    """The same for a benchmark that needs no GPU: the processor stands in its place."""
    where = {"device": f"{_processor()}, {len(os.sched_getaffinity(0))} processors"}
    return _write(name, where, CPU_PACKAGES, commit, module, metrics)


def _write(
    name: str, where: dict[str, Any], packages: tuple[str, ...], commit: str, module: str, metrics: dict[str, Any]
) -> Path:
    versions = {package: _version(package) for package in packages}
    document = {
        **where,
        "versions": {"python": platform.python_version(), "podgraph": podgraph.__version__, **versions},
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m " + " ".join([f"benchmarks.{module}", *sys.argv[1:]]),
        "metrics": metrics,
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    """The name of the first processor, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
