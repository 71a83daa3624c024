"""What serving benchmarks write: one JSON object a run, with an array over its requests for each quantity.

vLLM's (``vllm bench serve --save-detailed``) has ``input_lens``, ``output_lens`` and, in newer versions,
``start_times`` in seconds; SGLang's (``bench_serving --output-details``) appends one line a run with the first two.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from podgraph.errors import TraceError
from podgraph.workload.bad_rows import BadRows
from podgraph.workload.fields import BadRowError, parse_row
from podgraph.workload.layouts import request_layout
from podgraph.workload.text_rows import Batch

MAX_BYTES = 256 << 20
# Millions of requests; more than a benchmark makes.
MAX_ARRAY_BYTES = 16 << 20
# Stands in the first MiB.
MARK = b'"input_lens"'
# Quotes within a text are escaped, so these names are keys; the arrays are flat.
_ARRAY = re.compile(rb'"(input_lens|output_lens|start_times)"\s*:\s*(\[[^\[\]{}]*\])')

_TIMED = request_layout("vLLM benchmark", "input_lens", "output_lens", "start_times", "s")
_UNTIMED = request_layout("serving benchmark", "input_lens", "output_lens")


def read_benchmark(file: io.BufferedReader, source: str, bad: BadRows) -> Iterator[Batch]:
    """Yields the good requests of each run, ordered by their start.

    Raises:
        TraceError: the file is too large, or its arrays do not agree; a request is bad, and bad rows are fatal.
    """
    data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise TraceError(f"{source}: a benchmark's output above {MAX_BYTES} bytes; leave generated texts out of it")
    run: dict[str, list[Any]] = {}
    number = 0
    for found in _ARRAY.finditer(data):
        name = found[1].decode()
        if name in run:
            number += 1
            yield _run(run, number, source, bad)
            run = {}
        run[name] = _array(found[2], name, source)
    yield _run(run, number + 1, source, bad)


def _array(text: bytes, name: str, source: str) -> list[Any]:
    if len(text) > MAX_ARRAY_BYTES:
        raise TraceError(
            f"{source}: {name}: an array above {MAX_ARRAY_BYTES} bytes; write the requests as JSONL or CSV"
        )
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{source}: {name}: not JSON: {error}; let the benchmark write it again") from None
    assert isinstance(values, list)
    return values


def _run(run: dict[str, list[Any]], number: int, source: str, bad: BadRows) -> Batch:
    sizes = {name: len(values) for name, values in run.items()}
    if not {"input_lens", "output_lens"} <= sizes.keys() or len(set(sizes.values())) != 1:
        raise TraceError(
            f"{source}: run {number}: must have input_lens and output_lens of one length, got {sizes}; "
            "run the benchmark with --save-detailed (vLLM) or --output-details (SGLang)"
        )
    layout = _TIMED if "start_times" in run else _UNTIMED
    good = []
    for index, values in enumerate(zip(*run.values(), strict=True), 1):
        try:
            good.append((*parse_row(dict(zip(run, values, strict=True)), layout), index))
        except BadRowError as reason:
            bad.add(source, f"run {number}, request {index}", reason)
    # Listed as they were made, and not all start in that order.
    good.sort(key=lambda row: row[0])
    counts = np.array([counts for _, counts, _ in good], dtype=np.int64).reshape(-1, 2).T
    return Batch(
        layout, counts, [time for time, _, _ in good], np.array([i for _, _, i in good], dtype=np.int64), number
    )
