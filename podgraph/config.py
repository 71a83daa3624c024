"""YAML -> frozen `BuildSpec`. The only file that names yaml, and the only one where pydantic validates.

After `load_config` returns, every value has been checked and code below trusts it.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import pydantic
import yaml

from podgraph.errors import ConfigError
from podgraph.shapes import AttentionSpec, Bucket, BucketSpace

MAX_CONFIG_BYTES = 1 << 20
MAX_BUCKETS = 20_000
MAX_INT = 1 << 24

Size = Annotated[int, pydantic.Field(strict=True, gt=0, le=MAX_INT)]
SizeOrZero = Annotated[int, pydantic.Field(strict=True, ge=0, le=MAX_INT)]
Number = Annotated[float, pydantic.Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class Workspace:
    """Bounds of one step, beyond the bucket.

    Attributes:
        max_pages: KV pages that one step may name in all.
        max_kv_len: KV tokens of one request.
    """

    max_pages: int
    max_kv_len: int


@dataclass(frozen=True)
class BuildSpec:
    """A whole build: what `podgraph build` reads from a YAML file.

    Attributes:
        specs: attention specifications by name; a catalog holds every bucket for each of them.
        space: the axes as given.
        buckets: every reachable combination, largest first.
        dropped: how many combinations were unreachable, by reason.
        workspace: bounds of one step.
        backend: ``auto``, ``cuda`` or ``cpu``.
        source: the file that it was read from.
    """

    specs: MappingProxyType[str, AttentionSpec]
    space: BucketSpace
    buckets: tuple[Bucket, ...]
    dropped: MappingProxyType[str, int]
    workspace: Workspace
    backend: Literal["auto", "cuda", "cpu"]
    source: str


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class _Spec(_Model):
    num_qo_heads: Size
    num_kv_heads: Size
    head_dim: Size
    page_size: Size
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    kv_dtype: Literal["", "bfloat16", "float16", "float8_e4m3fn"] = ""
    k_scale: Number = 1.0
    v_scale: Number = 1.0
    kv_layout: Literal["NHD", "HND"] = "NHD"
    sm_scale: Number = 0.0
    window_left: Annotated[int, pydantic.Field(strict=True, ge=-1, le=MAX_INT)] = -1
    logits_soft_cap: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] = 0.0
    decode_rows: Size = 1


class _Buckets(_Model):
    batch: Annotated[list[Size], pydantic.Field(min_length=1, max_length=1024)]
    prefill_len: Annotated[list[SizeOrZero], pydantic.Field(min_length=1, max_length=1024)]
    decode_count: Annotated[list[SizeOrZero], pydantic.Field(min_length=1, max_length=1024)]


class _Workspace(_Model):
    max_pages: Size
    max_kv_len: Size


class _Config(_Model):
    specs: Annotated[dict[str, _Spec], pydantic.Field(min_length=1, max_length=16)]
    buckets: _Buckets
    workspace: _Workspace
    backend: Literal["auto", "cuda", "cpu"] = "auto"


class _Loader(yaml.SafeLoader):
    """Safe YAML without aliases (a few lines can expand to gigabytes) and with duplicate keys refused."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "anchors and aliases are not supported", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_config(path: str | Path) -> BuildSpec:
    """Reads and checks a build configuration.

    Raises:
        ConfigError: one line with the file, the key, what was got and what is allowed.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from e
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: {len(data)} bytes, at most {MAX_CONFIG_BYTES} are read as a config")
    try:
        document = yaml.load(data, _Loader)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {getattr(e, 'problem', None) or e}") from e
    except (RecursionError, ValueError) as e:  # absurd nesting; numbers and dates that Python refuses
        raise ConfigError(f"{path}: not valid YAML: {type(e).__name__}") from e
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path}: expected a mapping with keys {', '.join(_Config.model_fields)}, got {document!r:.80}"
        )
    try:
        config = _Config.model_validate(document)
    except pydantic.ValidationError as e:
        raise ConfigError(f"{path}: {_first_problem(e)}") from None
    return _resolve(config, str(path))


def _resolve(config: _Config, source: str) -> BuildSpec:
    specs = {name: AttentionSpec(**spec.model_dump()) for name, spec in config.specs.items()}
    for name, spec in specs.items():
        for field, got, allowed in spec.limits():
            raise ConfigError(f"{source}: specs.{name}.{field}: got {got!r}, allowed: {allowed}")
    space = BucketSpace(
        *(
            tuple(sorted(set(axis)))
            for axis in (config.buckets.batch, config.buckets.prefill_len, config.buckets.decode_count)
        )
    )
    combinations = len(space.batch) * len(space.prefill_len) * len(space.decode_count)
    if combinations > MAX_BUCKETS:
        raise ConfigError(f"{source}: buckets: {combinations} combinations, at most {MAX_BUCKETS} are enumerated")
    try:
        buckets, dropped = space.enumerate()
    except ConfigError as e:
        raise ConfigError(f"{source}: {e}") from None
    workspace = Workspace(config.workspace.max_pages, config.workspace.max_kv_len)
    for name, spec in specs.items():
        if workspace.max_kv_len > workspace.max_pages * spec.page_size:
            raise ConfigError(
                f"{source}: workspace.max_kv_len: got {workspace.max_kv_len}, allowed: at most max_pages * page_size = "
                f"{workspace.max_pages * spec.page_size} (spec {name})"
            )
    page_size = min(s.page_size for s in specs.values())
    needed = max(-(-b.prefill_len // page_size) + b.batch for b in buckets)
    if needed > workspace.max_pages:
        raise ConfigError(
            f"{source}: workspace.max_pages: got {workspace.max_pages}, allowed: at least {needed}, so that "
            "every request of the largest bucket has a page beside those of its new tokens"
        )
    return BuildSpec(
        specs=MappingProxyType(specs),
        space=space,
        buckets=buckets,
        dropped=MappingProxyType(dropped),
        workspace=workspace,
        backend=config.backend,
        source=source,
    )


def _first_problem(error: pydantic.ValidationError) -> str:
    """One line for the first of pydantic's findings: key path, got, allowed, did-you-mean."""
    problem = error.errors()[0]
    path = ""
    for part in problem["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    kind, got = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        word = str(problem["loc"][-1])
        allowed = _keys_at(problem["loc"][:-1])
        near = difflib.get_close_matches(word, allowed, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(allowed)}"
        return f"{path}: unknown key; {hint}"
    if kind == "missing":
        return f"{path}: missing"
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{path}: {message.replace('input should be', 'must be')}, got {got!r:.80}"


def _keys_at(loc: tuple[int | str, ...]) -> list[str]:
    match loc:
        case ():
            model: type[_Model] = _Config
        case ("specs", _):
            model = _Spec
        case ("buckets",):
            model = _Buckets
        case _:
            model = _Workspace
    return list(model.model_fields)
