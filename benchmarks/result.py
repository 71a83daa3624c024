"""The form of every result file: {device, driver, versions, commit, date, command, metrics}."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from podgraph import driver

FOLDER = Path(__file__).resolve().parent / "results"
PACKAGES = ("podgraph", "torch", "cuda-bindings", "flashinfer-python", "numpy")


def write_result(name: str, commit: str, metrics: dict[str, Any], module: str | None = None) -> Path:
    """Writes ``benchmarks/results/<name>.json`` for the current GPU and returns its path.

    Args:
        module: the benchmark's module, where it is not called like its result.
    """
    device = driver.open_device(torch.cuda.current_device())
    document = {
        "device": device.name,
        "driver": device.driver_version,
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in PACKAGES}},
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m " + " ".join([f"benchmarks.{module or name}", *sys.argv[1:]]),
        "metrics": metrics,
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _version(package: str) -> str:
    if package == "podgraph":
        import podgraph

        return podgraph.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
