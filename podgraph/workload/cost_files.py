"""Which costs a configuration is tuned with: a device profile's, or a table of the user's own."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import numpy as np

from podgraph.config import BuildSpec
from podgraph.errors import ConfigError
from podgraph.workload.cost_tables import RowCosts, TableCosts
from podgraph.workload.costs import AttentionCosts, Costs, Scope, StepCosts
from podgraph.workload.profile import DeviceProfile

MAX_COST_BYTES = 64 << 20
MAX_SIZE = 1 << 24
MAX_US = 10**12  # eleven days; sums of such times stay finite
ROWS = ("rows", "us")
SHAPES = ("batch", "prefill_len", "decode_count", "us")


def costs_of(build: BuildSpec, device: DeviceProfile, scope: Scope, table: Path | None = None) -> Costs:
    """The costs of a configuration's buckets.

    Args:
        build: gives the attention specifications and, for scope ``step``, the model.
        device: profile of the GPU.
        scope: ``step`` or ``attention``.
        table: CSV that takes the place of the profile's costs of buckets: columns ``rows, us`` or ``batch,
            prefill_len, decode_count, us``; microseconds of a whole step in that bucket without its attention in scope
            ``step``, and of a step's replays in scope ``attention`` beyond what its own work takes.

    Raises:
        ConfigError: the model is not known, or the table cannot be read.
    """
    specs = tuple(build.specs.values())
    base: Costs
    if scope == "attention":
        base = AttentionCosts(device, specs, 1 if build.model is None else build.model.num_layers)
    elif build.model is None:
        raise ConfigError(
            f"{build.source}: model: missing; scope step needs num_layers, hidden_size, intermediate_size, vocab_size: "
            "add them (`podgraph config --for-model` writes them), or take scope attention"
        )
    else:
        base = StepCosts(device, build.model, specs)
    return base if table is None else read_costs(table, base)


def read_costs(path: Path, base: Costs) -> RowCosts | TableCosts:
    """Reads a table of costs, in any order and with times above 0, to ``MAX_US``; ``base`` gives the rest.

    Raises:
        ConfigError: one line with the file, the line, what was got and what is allowed.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_COST_BYTES + 1)
        if len(data) > MAX_COST_BYTES:
            raise ConfigError(f"{path}: too long for a table of costs, allowed: at most {MAX_COST_BYTES >> 20} MiB")
        lines = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""))
        header = tuple(name.strip() for name in next(lines, []))
        if header not in (ROWS, SHAPES):
            raise ConfigError(
                f"{path}: line 1: got columns {', '.join(header)[:80] or 'none'}, allowed: {', '.join(ROWS)} or "
                f"{', '.join(SHAPES)}"
            )
        table: dict[tuple[int, ...], float] = {}
        for line in lines:
            if line:
                key, us = _row(line, header, f"{path}: line {lines.line_num}")
                if key in table:
                    raise ConfigError(f"{path}: line {lines.line_num}: {', '.join(map(str, key))} is there twice")
                table[key] = us
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from e
    except (UnicodeDecodeError, csv.Error) as e:
        raise ConfigError(f"{path}: not a CSV file: {str(e)[:80]}") from None
    if not table:
        raise ConfigError(f"{path}: no row below the header; give one cost at least")
    keys = sorted(table)
    source = f"the table {path.name}, and {base.source}"
    if header == ROWS:
        return RowCosts(base, tuple(key[0] for key in keys), tuple(table[key] for key in keys), source)
    return TableCosts(base, np.array(keys, dtype=np.int64), np.array([table[key] for key in keys]), source)


def _row(line: list[str], header: tuple[str, ...], where: str) -> tuple[tuple[int, ...], float]:
    if len(line) != len(header):
        raise ConfigError(f"{where}: got {len(line)} values, allowed: {', '.join(header)}")
    key = []
    for name, text in zip(header[:-1], line, strict=False):
        least = 1 if name in ("rows", "batch") else 0
        value = int(text) if text.strip().isdecimal() and len(text) < 16 else -1
        if not least <= value <= MAX_SIZE:
            raise ConfigError(f"{where}: {name}: got {text!r:.40}, allowed: {least} to {MAX_SIZE}")
        key.append(value)
    try:
        us = float(line[-1])
    except ValueError:
        us = math.nan
    if not 0 < us <= MAX_US:
        raise ConfigError(
            f"{where}: us: got {line[-1]!r:.40}, allowed: a number of microseconds above 0, at most {MAX_US}"
        )
    return tuple(key), us
