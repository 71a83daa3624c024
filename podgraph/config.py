"""YAML -> frozen `BuildSpec`.

After `load_config` returns, every value has been checked and code below trusts it. Whatever is wrong is one line:
``file: key.path[i]: problem, got X, allowed: Y``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from podgraph import schema, strict_yaml
from podgraph.buckets import BucketSpace, arithmetic, geometric
from podgraph.errors import ConfigError
from podgraph.planner.policy import Partition
from podgraph.quoting import key_path, shown
from podgraph.shapes import FAMILY_AXES, AttentionSpec, Bucket, ModelShape

MAX_BUCKETS = 20_000  # combinations of the axes, reachable or not


@dataclass(frozen=True)
class Workspace:
    """Bounds of one step, beyond the bucket.

    Attributes:
        max_pages: KV pages that one step may name in all.
        max_kv_len: KV tokens of one request.
        max_bytes: device memory that the regions of the catalog may take in all; None is no bound.
    """

    max_pages: int
    max_kv_len: int
    max_bytes: int | None = None


@dataclass(frozen=True)
class BuildSpec:
    """A whole build: what `podgraph build` reads from a YAML file.

    Attributes:
        specs: attention specifications by name; a catalog holds every bucket for each of them.
        space: the axes as given, and the families; empty where buckets are listed one by one.
        buckets: every wanted bucket, largest first.
        dropped: how many combinations of the axes became no bucket, by reason.
        workspace: bounds of one step.
        backend: ``auto``, ``cuda`` or ``cpu``.
        source: the file that it was read from.
        model: what is computed beside attention, where the file says it. Nothing that is built depends on it.
        partition: how prefill and decode share a round of the grid, where pod_sm90 does not serve a specification.
    """

    specs: MappingProxyType[str, AttentionSpec]
    space: BucketSpace
    buckets: tuple[Bucket, ...]
    dropped: MappingProxyType[str, int]
    workspace: Workspace
    backend: schema.Backend
    source: str
    model: ModelShape | None = None
    partition: Partition = "tiles"


def load_config(path: str | Path) -> BuildSpec:
    """Reads and checks a build configuration.

    Raises:
        ConfigError: one line with the file, the key, what was got and what is allowed.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(strict_yaml.MAX_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from e
    return parse_config(data, str(path))


def parse_config(data: bytes, source: str) -> BuildSpec:
    """Checks the text of a build configuration; ``source`` is what messages call it.

    Raises:
        ConfigError: one line with the source, the key, what was got and what is allowed.
    """
    try:
        return _resolve(schema.validate(strict_yaml.read(data)), source)
    except ConfigError as e:
        raise ConfigError(f"{source}: {e}") from None


def _resolve(document: schema.Document, source: str) -> BuildSpec:
    specs = {name: _spec(name, spec) for name, spec in document.specs.items()}
    space, buckets, dropped = _buckets(document.buckets)
    workspace = Workspace(**document.workspace.model_dump())
    _check_workspace(workspace, specs, buckets)
    return BuildSpec(
        specs=MappingProxyType(specs),
        space=space,
        buckets=buckets,
        dropped=MappingProxyType(dropped),
        workspace=workspace,
        backend=document.backend,
        source=source,
        model=None if document.model is None else ModelShape(**document.model.model_dump()),
        partition=document.partition,
    )


def _spec(name: str, spec: schema.Spec) -> AttentionSpec:
    if not (0 < len(name) <= schema.MAX_NAME and name.isprintable()):
        raise ConfigError(
            f"specs: not a name, got {shown(name)}, allowed: 1 to {schema.MAX_NAME} characters, all printable"
        )
    attention = AttentionSpec(**{field: value for field, value in spec.model_dump().items() if value is not None})
    for field, got, allowed in attention.limits():
        raise ConfigError(f"{key_path(['specs', name, field])}: got {shown(got)}, allowed: {allowed}")
    return attention


def _buckets(buckets: schema.Buckets) -> tuple[BucketSpace, tuple[Bucket, ...], dict[str, int]]:
    """The axes, all buckets, largest first, and how many combinations were dropped, by reason."""
    if buckets.list is None:
        space = _space(buckets)
        return space, *space.enumerate()
    if others := [name for name in type(buckets).model_fields if name != "list" and getattr(buckets, name) is not None]:
        raise ConfigError(f"buckets.list: stands alone, got {', '.join(others)} too; keep the list, or the axes")
    seen: dict[Bucket, int] = {}
    for index, shape in enumerate(buckets.list):
        bucket = Bucket(*shape)
        if bucket.unreachable:
            raise ConfigError(f"buckets.list[{index}]: no batch needs it, got {list(shape)}: {bucket.unreachable}")
        if bucket in seen:
            raise ConfigError(f"buckets.list[{index}]: the same bucket as buckets.list[{seen[bucket]}]; drop one")
        seen[bucket] = index
    return BucketSpace(), tuple(sorted(seen, reverse=True)), {}


def _space(buckets: schema.Buckets) -> BucketSpace:
    families = None if buckets.families is None else tuple(dict.fromkeys(buckets.families))
    axes = {}
    for axis in FAMILY_AXES["mixed"]:
        form = getattr(buckets, axis)
        users = [f for f in FAMILY_AXES if axis in FAMILY_AXES[f] and f in (families or FAMILY_AXES)]
        if form is None and users:
            raise ConfigError(f"buckets.{axis}: missing; buckets of the {users[0]} family need it")
        axes[axis] = () if form is None else tuple(sorted(set(_values(f"buckets.{axis}", form))))
    space = BucketSpace(**axes, families=families)
    if space.candidates > MAX_BUCKETS:
        raise ConfigError(f"buckets: too many combinations, got {space.candidates}, allowed: at most {MAX_BUCKETS}")
    return space


def _values(where: str, form: list[int] | schema.Arithmetic | schema.Geometric) -> Iterable[int]:
    if isinstance(form, list):
        return form
    if isinstance(form, schema.Arithmetic):
        return _arithmetic(where, form)
    return _geometric(f"{where}.geometric", form.geometric)


def _arithmetic(where: str, axis: schema.Arithmetic) -> tuple[int, ...]:
    _check_ascending(where, axis.start, axis.stop)
    count = -(-(axis.stop - axis.start) // axis.step) + 1
    if count > schema.MAX_VALUES:
        raise ConfigError(f"{where}.step: too small, got {axis.step}, allowed: at most {schema.MAX_VALUES} values")
    return arithmetic(axis.start, axis.stop, axis.step)


def _geometric(where: str, axis: schema.Progression) -> tuple[int, ...]:
    _check_ascending(where, axis.start, axis.stop)
    if math.log(axis.stop / axis.start) / math.log(axis.ratio) > schema.MAX_VALUES:
        raise ConfigError(f"{where}.ratio: too small, got {axis.ratio}, allowed: at most {schema.MAX_VALUES} values")
    return geometric(axis.start, axis.stop, axis.ratio)


def _check_ascending(where: str, start: int, stop: int) -> None:
    if start > stop:
        raise ConfigError(f"{where}.start: larger than stop, got {start}, allowed: at most {stop}")


def _check_workspace(workspace: Workspace, specs: dict[str, AttentionSpec], buckets: tuple[Bucket, ...]) -> None:
    for name, spec in specs.items():
        tokens = workspace.max_pages * spec.page_size
        if workspace.max_kv_len > tokens:
            raise ConfigError(
                f"workspace.max_kv_len: got {workspace.max_kv_len}, allowed: at most max_pages * page_size = {tokens} "
                f"({key_path(['specs', name])})"
            )
    page_size = min(spec.page_size for spec in specs.values())
    pages = max(-(-b.prefill_len // page_size) + b.batch for b in buckets)
    if pages > workspace.max_pages:
        raise ConfigError(
            f"workspace.max_pages: got {workspace.max_pages}, allowed: at least {pages}, so that every request of the "
            "largest bucket has a page beside those of its new tokens"
        )
    longest = max(b.prefill_len for b in buckets)
    rows = workspace.max_kv_len * max(b.prefill_slots for b in buckets if b.prefill_len == longest)
    if longest > rows:
        raise ConfigError(
            f"buckets.prefill_len: the largest value is beyond the workspace, got {longest}, allowed: at most {rows}, "
            f"max_kv_len = {workspace.max_kv_len} for each prefill slot"
        )
