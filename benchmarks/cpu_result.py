"""The form of results that need no GPU: like `benchmarks.result`, with the processor in the place of the GPU."""

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
PACKAGES = ("numpy", "scipy", "polars")


def write_result(name: str, commit: str, metrics: dict[str, Any], module: str) -> Path:
    """Writes ``benchmarks/results/<name>.json`` and returns its path."""
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    document = {
        "device": f"{_processor()}, {len(os.sched_getaffinity(0))} processors",
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


def _processor() -> str:
    """The name of the first processor, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
