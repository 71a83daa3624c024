"""What a build configuration may say, value by value. The only file that validates with pydantic.

Whatever is wrong is one line: ``key.path[i]: problem, got X, allowed: Y``.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, cast

import pydantic
from pydantic import Discriminator, Field, PlainValidator, Tag
from pydantic_core import ErrorDetails, PydanticCustomError

from podgraph.byte_sizes import UNITS, parse
from podgraph.errors import ConfigError
from podgraph.planner.policy import PARTITIONS, Partition
from podgraph.quoting import key_path, shown
from podgraph.shapes import (
    DECODE_TILE,
    DTYPES,
    FAMILY_AXES,
    FP8,
    HEAD_DIMS,
    KV_LAYOUTS,
    MAX_HEADS,
    MAX_PAGE_SIZE,
    SCALES,
)

MAX_INT = 1 << 24  # heads, rows, pages, tokens: the same bound as in a catalog
MAX_BYTES = 1 << 50
MAX_VALUES = 1024  # of one axis
MAX_SPECS = 16
MAX_NAME = 256  # characters of a name, as in a catalog

AXIS_FORMS = "a list, {start, stop, step}, or {geometric: {start, stop, ratio}}"

T = TypeVar("T")


def _refuse(problem: str, allowed: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{problem}", {"problem": problem, "allowed": allowed})


def _integer(low: int, high: int = MAX_INT) -> Callable[[object], int]:
    def check(value: object) -> int:
        if type(value) is not int:  # a bool is no integer here
            raise _refuse("must be an integer", f"{low} to {high}")
        if not low <= value <= high:
            raise _refuse("out of range", f"{low} to {high}")
        return value

    return check


def _one_of(*sizes: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if type(value) is not int or value not in sizes:
            problem = "must be an integer" if type(value) is not int else "not supported"
            raise _refuse(problem, " or ".join(map(str, sizes)))
        return value

    return check


def _number(allowed: str, holds: Callable[[float], bool]) -> Callable[[object], float]:
    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _refuse("must be a number", allowed)
        if not (math.isfinite(value) and holds(value)):
            raise _refuse("out of range", allowed)
        return float(value)

    return check


def _word(*words: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise _refuse("unknown value", " or ".join(words))
        return value

    return check


def _shape(value: object) -> tuple[int, int, int]:
    allowed = f"[batch, prefill_len, decode_count], integers of 0 to {MAX_INT}"
    if not isinstance(value, list) or len(value) != 3 or any(type(size) is not int for size in value):
        raise _refuse("must be three integers", allowed)
    if not all(0 <= size <= MAX_INT for size in value):
        raise _refuse("out of range", allowed)
    batch, prefill_len, decode_count = value
    return batch, prefill_len, decode_count


def _bytes(value: object) -> int:
    allowed = f"a number of bytes, or such as 512 MiB, with one of {', '.join(UNITS)}"
    try:
        size = parse(value) if isinstance(value, str) else value
    except ValueError as e:
        raise _refuse(str(e), allowed) from None
    if type(size) is not int:
        raise _refuse("must be a size", allowed)
    if not 0 < size <= MAX_BYTES:
        raise _refuse("out of range", f"1 B to {MAX_BYTES >> 30} GiB")
    return size


def _or_null(check: Callable[[object], T]) -> Callable[[object], T | None]:
    return lambda value: None if value is None else check(value)


_scale = _number("{:g} to {:g}".format(*SCALES), lambda x: SCALES[0] <= x <= SCALES[1])
_soft_cap = _number("0 (none) or {:g} to {:g}".format(*SCALES), lambda x: x == 0 or SCALES[0] <= x <= SCALES[1])

Size = Annotated[int, PlainValidator(_integer(1))]
SizeOrZero = Annotated[int, PlainValidator(_integer(0))]
Heads = Annotated[int, PlainValidator(_integer(1, MAX_HEADS))]
Scale = Annotated[float, PlainValidator(_scale)]
Backend = Literal["auto", "cuda", "cpu"]


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Spec(_Model):
    """`AttentionSpec`, with its defaults."""

    num_qo_heads: Heads
    num_kv_heads: Heads
    head_dim: Annotated[int, PlainValidator(_one_of(*HEAD_DIMS))]
    page_size: Annotated[int, PlainValidator(_integer(1, MAX_PAGE_SIZE))]
    dtype: Annotated[str, PlainValidator(_word(*DTYPES))] = "bfloat16"
    kv_dtype: Annotated[str | None, PlainValidator(_or_null(_word(*DTYPES, FP8)))] = None
    k_scale: Scale = 1.0
    v_scale: Scale = 1.0
    kv_layout: Annotated[str, PlainValidator(_word(*KV_LAYOUTS))] = "NHD"
    sm_scale: Annotated[float | None, PlainValidator(_or_null(_scale))] = None
    window_left: Annotated[int, PlainValidator(_integer(-1))] = -1
    logits_soft_cap: Annotated[float, PlainValidator(_soft_cap)] = 0.0
    decode_rows: Annotated[int, PlainValidator(_integer(1, DECODE_TILE))] = 1


class Arithmetic(_Model):
    """``{start: 8, stop: 64, step: 8}``."""

    start: Size
    stop: Size
    step: Size


class Progression(_Model):
    """What stands under ``geometric``."""

    start: Size
    stop: Size
    ratio: Annotated[float, PlainValidator(_number("a number above 1", lambda x: x > 1))]


class Geometric(_Model):
    """``{geometric: {start: 1, stop: 64, ratio: 2}}``."""

    geometric: Progression


def _axis_form(value: object) -> str | None:
    if isinstance(value, list):
        return "list"
    if isinstance(value, dict):
        return "geometric" if "geometric" in value else "arithmetic"
    return None


_FORM = Discriminator(_axis_form, "axis", "must be an axis")
_LENGTH = Field(min_length=1, max_length=MAX_VALUES)

Axis = Annotated[
    Annotated[list[Size], _LENGTH, Tag("list")]
    | Annotated[Arithmetic, Tag("arithmetic")]
    | Annotated[Geometric, Tag("geometric")],
    _FORM,
]
AxisWithZero = Annotated[
    Annotated[list[SizeOrZero], _LENGTH, Tag("list")]
    | Annotated[Arithmetic, Tag("arithmetic")]
    | Annotated[Geometric, Tag("geometric")],
    _FORM,
]
Family = Annotated[str, PlainValidator(_word(*FAMILY_AXES))]
Families = Annotated[list[Family] | None, Field(min_length=1)]
Shapes = Annotated[list[Annotated[tuple[int, int, int], PlainValidator(_shape)]], _LENGTH]


class Buckets(_Model):
    """`BucketSpace`; an axis may be left out where none of the families uses it. Or a list of single buckets."""

    batch: Axis | None = None
    prefill_len: AxisWithZero | None = None
    decode_count: AxisWithZero | None = None
    families: Families = None
    # the last one: below it, `list` would be this field
    list: Shapes | None = None


class Workspace(_Model):
    max_pages: Size
    max_kv_len: Size
    max_bytes: Annotated[int | None, PlainValidator(_or_null(_bytes))] = None


class Shape(_Model):
    """`ModelShape`."""

    num_layers: Size
    hidden_size: Size
    intermediate_size: Size
    vocab_size: Size


class Document(_Model):
    """A whole file."""

    specs: Annotated[dict[str, Spec], Field(min_length=1, max_length=MAX_SPECS)]
    buckets: Buckets
    workspace: Workspace
    model: Shape | None = None
    backend: Annotated[Backend, PlainValidator(_word("auto", "cuda", "cpu"))] = "auto"
    partition: Annotated[Partition, PlainValidator(_word(*PARTITIONS))] = "tiles"


def validate(document: object) -> Document:
    """The model of a file's content.

    Raises:
        ConfigError: one line about the first thing that is wrong.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"must be a mapping, got {shown(document)}, allowed: {_allowed_keys(Document)}")
    try:
        return Document.model_validate(document)
    except pydantic.ValidationError as e:
        problems = e.errors(include_url=False)
    # a misspelt key is missing under its right name too: the misspelling says more
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path = _written(problem["loc"])
    sentence = _unknown_key(document, problem) if problem["type"] == "extra_forbidden" else _sentence(problem)
    raise ConfigError(f"{key_path(path)}: {sentence}")


def _unknown_key(document: object, problem: ErrorDetails) -> str:
    """Says which key was meant: one that is not there too."""
    model = _model_at(problem["loc"][:-1])
    *path, key = _written(problem["loc"])
    present = functools.reduce(lambda content, part: content[part], path, cast(Any, document))
    missing = [name for name in model.model_fields if name not in present]
    if model is Arithmetic and present.keys().isdisjoint(model.model_fields):
        missing.append("geometric")  # the other form, misspelt
    near = difflib.get_close_matches(str(key), missing, 1)
    return f"unknown key; did you mean {near[0]!r}?" if near else f"unknown key, allowed: {_allowed_keys(model)}"


def _sentence(problem: ErrorDetails) -> str:
    kind, got = problem["type"], problem["input"]
    model = _model_at(problem["loc"] if kind.endswith("_type") else problem["loc"][:-1])
    if kind == "missing":
        return "missing"
    if kind == "refused":
        return f"{problem['ctx']['problem']}, got {shown(got)}, allowed: {problem['ctx']['allowed']}"
    if kind == "axis":
        return f"must be an axis, got {shown(got)}, allowed: {AXIS_FORMS}"
    if kind == "too_short":
        return f"must not be empty, got {shown(got)}, allowed: one value at least"
    if kind == "too_long":
        return f"too many values, got {len(got)}, allowed: at most {problem['ctx']['max_length']}"
    if kind == "list_type":
        items = "[batch, prefill_len, decode_count]" if problem["loc"][-1] == "list" else ", ".join(FAMILY_AXES)
        return f"must be a list, got {shown(got)}, allowed: a list of {items}"
    if kind == "dict_type":
        return f"must be a mapping, got {shown(got)}, allowed: names and what they stand for"
    return f"must be a mapping, got {shown(got)}, allowed: {_allowed_keys(model)}"


def _written(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Where something stands in the file: without the tag of an axis' form."""
    return loc[:2] + loc[3:] if loc[0] == "buckets" and loc[1:2] not in (("families",), ("list",)) else loc


def _model_at(loc: tuple[int | str, ...]) -> type[_Model]:
    match loc:
        case ("specs", _):
            return Spec
        case ("buckets",):
            return Buckets
        case ("buckets", _, "arithmetic"):
            return Arithmetic
        case ("buckets", _, "geometric"):
            return Geometric
        case ("buckets", _, "geometric", "geometric"):
            return Progression
        case ("workspace",):
            return Workspace
        case ("model",):
            return Shape
    return Document


def _allowed_keys(model: type[_Model]) -> str:
    return ", ".join(model.model_fields)
