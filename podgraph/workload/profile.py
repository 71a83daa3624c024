"""A device profile: what one GPU takes for the pieces of a model step, measured or estimated.

Shipped profiles lie in ``configs/devices``; any other is named by its path.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from podgraph import strict_yaml
from podgraph.errors import ConfigError

# of one layer, in the order in which they run
PRODUCTS = ("qkv", "o", "gate_up", "down")

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """Microseconds by row count, as measured.

    Attributes:
        rows: ascending.
        us: one for each of ``rows``.
        size: what one row stands for: elements of the weights for products, elements per row for elementwise kernels.
    """

    rows: tuple[int, ...]
    us: tuple[float, ...]
    size: int

    def step_us(self, rows: Counts, tile_rows: int) -> Floats:
        """The time of the next larger measured count: a kernel of that many rows can serve fewer. ``[n]`` -> ``[n]``.

        Nothing is assumed about the order of times: a measured table may fall. Where counts lie more than ``tile_rows``
        apart, whole tiles between them are interpolated; beyond the last one, time grows in proportion to the tiles.
        """
        measured, last = np.array(self.rows), self.rows[-1]
        tiles = np.arange(tile_rows, last, tile_rows)
        after = np.searchsorted(measured, tiles)
        wide = (after > 0) & (measured[after] - measured[np.maximum(after, 1) - 1] > tile_rows)
        steps = np.union1d(measured, tiles[wide])
        times = np.interp(steps, measured, self.us)[np.searchsorted(steps, rows).clip(max=steps.size - 1)]
        result: Floats = times * np.maximum(1.0, -(-rows // tile_rows) * tile_rows / last)
        return result

    def line_us(self, rows: Counts) -> Floats:
        """Linear between measured counts, and in proportion to the rows beyond the last one. ``[n]`` -> ``[n]``."""
        last = self.rows[-1]
        return np.interp(rows, self.rows, self.us) * np.maximum(1.0, rows / last)


@dataclass(frozen=True)
class DeviceProfile:
    """One kind of GPU.

    Attributes:
        name: of the GPU.
        source: where the numbers are from, for the report.
        bandwidth: bytes per second of device memory that kernels reach.
        flops: floating-point operations per second that matrix products reach.
        tile_rows: a matrix product computes whole tiles of this many rows.
        sm_count: its multiprocessors.
        launch_us: fixed part of a graph launch.
        node_bytes: device memory of one node of a large graph.
        dedicated_bytes, shared_bytes: device memory of one bucket of an attention catalog, with a graph exec of its own
            or with one that many share.
        layer_host_us: host time to enqueue one layer without attention, eagerly.
        attention_host_us: host time of one layer's eager attention call.
        plan_host_us: host time to plan a step's attention.
        attention_fixed_us: of one layer's attention kernels.
        attention_bandwidth: bytes of KV cache per second that attention reads.
        attention_flops: floating-point operations per second of prefill attention.
        idle_slot_us: what one empty request slot adds to an attention replay.
        idle_row_us: what one empty prefill row adds to it.
        products: measured times of a layer's matrix products by name of ``PRODUCTS``; empty for the formula.
        shapes: (inputs, outputs) of those products.
        elementwise: measured times of what stands between them in one layer; None for the formula.
        logits: measured times of the output matrix; None for the formula.
    """

    name: str
    source: str
    bandwidth: float
    flops: float
    tile_rows: int
    sm_count: int
    launch_us: float
    node_bytes: int
    dedicated_bytes: int
    shared_bytes: int
    layer_host_us: float
    attention_host_us: float
    plan_host_us: float
    attention_fixed_us: float
    attention_bandwidth: float
    attention_flops: float
    idle_slot_us: float
    idle_row_us: float
    products: Mapping[str, Table]
    shapes: Mapping[str, tuple[int, int]]
    elementwise: Table | None = None
    logits: Table | None = None

    def product_us(self, name: str, inputs: int, outputs: int, rows: Counts) -> Floats:
        """Microseconds of ``[rows, inputs] x [inputs, outputs]`` in 16 bits, ``[n]`` -> ``[n]``.

        The measured staircase of the product of that name, scaled by the roofline's ratio where the model's matrices
        have another size; the roofline itself where nothing was measured.
        """
        formula = self.roofline_us(inputs, outputs, rows)
        if name not in self.products:
            return formula
        table = self.products[name]
        if (inputs, outputs) == self.shapes[name]:
            return table.step_us(rows, self.tile_rows)
        return table.step_us(rows, self.tile_rows) * (formula / self.roofline_us(*self.shapes[name], rows))

    def roofline_us(self, inputs: int, outputs: int, rows: Counts) -> Floats:
        """max(bytes / bandwidth, flops of whole tiles / rate): weights are read once, rows read and written."""
        moved = 2.0 * (inputs * outputs + rows * (inputs + outputs))
        computed = 2.0 * inputs * outputs * (-(-rows // self.tile_rows) * self.tile_rows)
        result: Floats = np.maximum(moved / self.bandwidth, computed / self.flops) * 1e6
        return result


# key -> (field, least value allowed, exclusive where it must be above it)
_SCALARS = {
    "bandwidth": ("bandwidth", float, False),
    "flops": ("flops", float, False),
    "tile_rows": ("tile_rows", int, False),
    "sm_count": ("sm_count", int, False),
    "graph.launch_us": ("launch_us", float, True),
    "graph.node_bytes": ("node_bytes", int, True),
    "graph.dedicated_bytes": ("dedicated_bytes", int, True),
    "graph.shared_bytes": ("shared_bytes", int, True),
    "eager.layer_us": ("layer_host_us", float, True),
    "eager.attention_us": ("attention_host_us", float, True),
    "eager.plan_us": ("plan_host_us", float, True),
    "attention.fixed_us": ("attention_fixed_us", float, True),
    "attention.bandwidth": ("attention_bandwidth", float, False),
    "attention.flops": ("attention_flops", float, False),
    "attention.idle_slot_us": ("idle_slot_us", float, True),
    "attention.idle_row_us": ("idle_row_us", float, True),
}
_TABLES = {
    **{f"products.{name}": ("rows_shared", "shape", "us") for name in PRODUCTS},
    "elementwise": ("rows", "row_elements", "us"),
    "logits": ("rows", "shape", "us"),
}


def profiles() -> list[str]:
    """Names of the shipped profiles."""
    return sorted({path.stem for folder in _folders() for path in folder.glob("*.yaml")})


def load_profile(name: str | Path) -> DeviceProfile:
    """Reads a shipped profile by its name, or any by its path.

    Raises:
        ConfigError: one line with the file, the key, what was got and what is allowed.
    """
    path = Path(name)
    if re.fullmatch(r"[\w-]+", str(name)):
        found = [folder / f"{name}.yaml" for folder in _folders() if (folder / f"{name}.yaml").is_file()]
        if not found:
            raise ConfigError(
                f"device profile: got {str(name)!r}, allowed: {', '.join(profiles()) or 'none is installed'}, "
                "or the path of a YAML file"
            )
        path = found[0]
    try:
        with path.open("rb") as file:
            data = file.read(strict_yaml.MAX_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}; name a device profile") from e
    try:
        return _profile(strict_yaml.read(data))
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


def _folders() -> list[Path]:
    package = Path(__file__).parents[1]
    return [folder for folder in (package / "devices", package.parent / "configs" / "devices") if folder.is_dir()]


def _profile(content: Any) -> DeviceProfile:
    keys = {key.split(".")[0] for key in (*_SCALARS, *_TABLES)} | {"name", "source"}
    root = _mapping(content, "", keys)
    for group in sorted(keys):
        inner = {key.split(".")[1] for key in (*_SCALARS, *_TABLES) if key.startswith(f"{group}.")}
        if inner and group in root:
            _mapping(root[group], group, inner | ({"rows"} if group == "products" else set()))
    fields: dict[str, Any] = {name: _text(root, name) for name in ("name", "source")}
    for key, (field, kind, zero) in _SCALARS.items():
        group, _, leaf = key.rpartition(".")
        parent = root.get(group, {}) if group else root
        if leaf not in parent:
            raise ConfigError(f"{key}: missing")
        fields[field] = _number(parent[leaf], key, kind, zero)
    measured = root.get("products", {})
    names = [name for name in PRODUCTS if name in measured]
    if names and len(names) < len(PRODUCTS):
        raise ConfigError(f"products: got {', '.join(names)}, allowed: all of {', '.join(PRODUCTS)}, or none")
    tables, shapes = {}, {}
    for name in names:
        entry = _mapping(measured[name], f"products.{name}", {"shape", "us"})
        shapes[name] = _shape(entry, f"products.{name}")
        tables[name] = _table(measured.get("rows"), entry, f"products.{name}", math.prod(shapes[name]))
    for key in ("elementwise", "logits"):
        if key in root:
            size = "row_elements" if key == "elementwise" else "shape"
            entry = _mapping(root[key], key, {"rows", "us", size})
            elements = (
                int(_number(entry.get(size), f"{key}.{size}", int, False))
                if size == "row_elements"
                else math.prod(_shape(entry, key))
            )
            fields[key] = _table(entry.get("rows"), entry, key, elements)
    return DeviceProfile(products=MappingProxyType(tables), shapes=MappingProxyType(shapes), **fields)


def _mapping(value: Any, key: str, allowed: set[str]) -> dict[str, Any]:
    where = f"{key}: " if key else ""
    if not isinstance(value, dict):
        raise ConfigError(f"{where}must be a mapping, got {value!r:.40}, allowed: {', '.join(sorted(allowed))}")
    for name in value:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(allowed))}"
            raise ConfigError(f"{key}{'.' if key else ''}{name}: unknown key; {hint}")
    return value


def _text(root: dict[str, Any], key: str) -> str:
    value = root.get(key)
    if not isinstance(value, str) or not value.isprintable() or not value:
        raise ConfigError(f"{key}: must be a line of text, got {value!r:.40}")
    return value


def _number(value: Any, key: str, kind: type, zero: bool) -> float:
    wanted = "an integer" if kind is int else "a number"
    allowed = f"{wanted} {'of 0 or more' if zero else 'above 0'}"
    good = type(value) is int or (kind is float and isinstance(value, float) and math.isfinite(value))
    if not good or value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{key}: got {value!r:.40}, allowed: {allowed}")
    return kind(value)  # type: ignore[no-any-return]


def _shape(entry: dict[str, Any], key: str) -> tuple[int, int]:
    shape = entry.get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        raise ConfigError(f"{key}.shape: got {shape!r:.40}, allowed: [inputs, outputs]")
    inputs, outputs = (int(_number(size, f"{key}.shape", int, False)) for size in shape)
    return inputs, outputs


def _table(rows: Any, entry: dict[str, Any], key: str, size: int) -> Table:
    times = entry.get("us")
    if not isinstance(rows, list) or not rows or not isinstance(times, list) or len(times) != len(rows):
        raise ConfigError(f"{key}.us: must be a list with one time for each of rows")
    counts = [int(_number(row, f"{key}.rows", int, False)) for row in rows]
    if sorted(set(counts)) != counts:
        raise ConfigError(f"{key}.rows: must ascend, each once")
    return Table(tuple(counts), tuple(_number(us, f"{key}.us", float, False) for us in times), size)
