"""Writes the device profile of `bench_device`'s result: the numbers of ``configs/devices/h200.yaml``.

    python -m benchmarks.device_profile > configs/devices/h200.yaml

What `bench_device` does not measure is written here, with its source in a comment.
"""

from __future__ import annotations

import json
import math
from typing import Any

from benchmarks.result import FOLDER

HEAD = """\
# What an NVIDIA H200 takes for the pieces of a model step, for `podgraph tune` and `podgraph report`.
# Written by `python -m benchmarks.device_profile` from benchmarks/results/device.json; do not edit.
"""


def main() -> None:
    print(profile(json.loads((FOLDER / "device.json").read_text())), end="")


def profile(document: dict[str, Any]) -> str:
    """The YAML text for a result of `bench_device`."""
    m = document["metrics"]
    elements = 10 * 4096 + 2 * 5120 + 2 * 14336
    elementwise, logits = m["elementwise_us"], m["logits"]
    lines = [
        f"name: {document['device']}",
        f"source: measured {document['date'][:10]} by benchmarks/bench_device.py, but for flops, tile_rows, attention",
        f"bandwidth: {m['copy_bytes_per_s']:.3g}        # bytes per second; a large copy",
        "flops: 7.8e+14             # per second, bfloat16; only for matrices without a table",
        "tile_rows: 64              # the same",
        "sm_count: 132",
        "",
        "graph:",
        f"  launch_us: {m['graph']['fixed_us']:.2f}          # on the device, before the first kernel",
        "  node_bytes: 1536         # device memory of a node of a large graph",
        "  dedicated_bytes: 589522  # of a bucket of attention with an exec of its own: results/load.json",
        "  shared_bytes: 8150       # of one that shares its exec",
        "",
        "eager:                     # host time of a step without a graph",
        f"  layer_us: {m['eager']['layer_host_us']:.1f}          # one layer without attention, in torch",
        f"  attention_us: {m['eager']['run_host_us']:.1f}       # one layer's call of FlashInfer's batch POD",
        f"  plan_us: {m['eager']['plan_host_us']:.1f}           # its plan, once a step",
        "",
        "attention:                 # one layer; fitted to the best of all ways on six shapes, within 25 %",
        "  fixed_us: 20",
        "  bandwidth: 4.3e+12       # KV bytes per second",
        "  flops: 7.2e+14           # of prefill rows",
        "  idle_slot_us: 0.015      # an estimate: 8 CTAs find nothing to do for 0.5 us each, 264 at a time",
        "  idle_row_us: 0.0005      # an estimate: the same for each 32 rows",
        "",
        "products:                  # bfloat16, in a graph, weights from memory",
        _list("  rows", m["rows"]),
        *(line for name, times in m["products"].items() for line in _product(name, m["product_shapes"][name], times)),
        "",
        "elementwise:               # norms, rotation and activation of a layer, as torch kernels",
        f"  row_elements: {elements}      # read and written for one row",
        _list("  rows", [int(rows) for rows in elementwise]),
        _list("  us", elementwise.values()),
        "",
        "logits:",
        "  shape: [4096, 128256]",
        _list("  rows", [int(rows) for rows in logits]),
        _list("  us", logits.values()),
    ]
    return HEAD + "\n".join(lines) + "\n"


def _product(name: str, shape: list[int], times: list[float]) -> list[str]:
    return [f"  {name}:", f"    shape: {shape}", _list("    us", times)]


def _list(key: str, values: Any) -> str:
    """A list of numbers on lines of at most 120 characters."""
    indent = " " * (len(key) - len(key.lstrip()) + 2)
    lines, line = [], f"{key}: ["
    for value in values:
        text = str(value) if isinstance(value, int) else f"{value:.{max(1, 3 - math.ceil(math.log10(value)))}f}"
        if len(line) + len(text) + 2 > 118:
            lines.append(line.rstrip())
            line = indent
        line += f"{text}, "
    return "\n".join([*lines, line.rstrip(", ") + "]"])


if __name__ == "__main__":
    main()
