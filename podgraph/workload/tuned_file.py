"""The configuration of a tuned set: what `podgraph build` takes, with what each bucket is for in comments."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from podgraph.config import BuildSpec, parse_config
from podgraph.shapes import AttentionSpec
from podgraph.workload.coverage import BucketUse

WIDTH = 120


def tuned_text(build: BuildSpec, uses: Sequence[BucketUse], notes: Sequence[str]) -> str:
    """The text of a build configuration: everything of another one, but for its buckets. The same for the same input.

    Args:
        build: the configuration that was tuned for.
        uses: the set, each bucket with what it does.
        notes: paragraphs of the comment at its top.

    Raises:
        ConfigError: `podgraph build` would refuse it: the workspace does not hold a bucket.
    """
    lines = [f"# {line}" for note in notes for line in textwrap.wrap(_plain(note), WIDTH - 2)]
    text = "\n".join([*lines, "", *_body(build, uses)]) + "\n"
    parse_config(text.encode(), f"{build.source}, tuned")
    return text


def _body(build: BuildSpec, uses: Sequence[BucketUse]) -> Iterator[str]:
    yield "specs:"
    for name, spec in build.specs.items():
        yield f"  {_word(name)}:"
        for field, value in _given(spec):
            yield f"    {field}: {value}"
    yield ""
    yield "buckets:"
    yield "  list:                   # [batch, prefill_len, decode_count], and the share of steps that it serves"
    for use in uses:
        triple = str([use.bucket.batch, use.bucket.prefill_len, use.bucket.decode_count])
        yield f"    - {triple:<20}# {use.share:.2%}"
    yield ""
    yield "workspace:"
    yield f"  max_pages: {build.workspace.max_pages}"
    yield f"  max_kv_len: {build.workspace.max_kv_len}"
    if build.workspace.max_bytes is not None:
        yield f"  max_bytes: {build.workspace.max_bytes}"
    if build.model is not None:
        yield ""
        yield "model:"
        yield from (f"  {name}: {value}" for name, value in asdict(build.model).items())
    yield ""
    yield f"backend: {build.backend}"
    yield f"partition: {build.partition}"


def _given(spec: AttentionSpec) -> Iterator[tuple[str, object]]:
    """Fields that are needed, or are not what they would be by default."""
    plain = AttentionSpec(spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.page_size, spec.dtype)
    required = {"num_qo_heads", "num_kv_heads", "head_dim", "page_size", "dtype"}
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name in required or value != getattr(plain, field.name):
            yield field.name, value


def _word(name: str) -> str:
    """A name as YAML writes it."""
    return name if re.fullmatch(r"[A-Za-z][\w.-]*", name, re.ASCII) and _is_text(name) else json.dumps(name)


def _is_text(name: str) -> bool:
    return name.lower() not in ("null", "true", "false")


def _plain(note: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in note)
