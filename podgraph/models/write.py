"""The text of a build configuration for a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from podgraph.errors import ConfigError
from podgraph.models.attention import PAGE_SIZE, attention_specs, refuse_other_attention
from podgraph.models.document import LENGTH_KEYS, Model, language_model
from podgraph.models.layers import Layers, layers_of
from podgraph.models.shape import model_shape
from podgraph.shapes import DTYPES, AttentionSpec

MAX_MODEL_BYTES = 8 << 20  # quantised checkpoints list their layers in this file
MIN_PAGES = 65_536
DEFAULT_KV_LEN = 32_768

# TEMPLATE's: where 8 and 64 requests decode, 8 slots of a batch are left for prefill
PREFILL_LENS = (256, 1024)
PREFILL_SLOTS = 8

TEMPLATE = """\
# {title}. Written by `podgraph config`: edit the buckets to the steps that your engine makes.
{notes}
specs:
{specs}
# Every (batch, prefill_len, decode_count) with a slot for prefill becomes a bucket, and each side alone as well.
buckets:
  batch: [8, 16, 72]            # request slots in all: decodes, and at least one prefill
  prefill_len: {prefill_len} # query rows of prefill in one step, over all requests
  decode_count: [8, 64]         # requests that decode
  families: [decode, mixed, prefill]

workspace:
  max_pages: {max_pages} # KV pages that one step may name in all
  max_kv_len: {max_kv_len} # KV tokens of one request

{model}
backend: auto                   # cuda where there is a GPU and a compiler, else cpu
"""


def config_from_file(path: str | Path, tp: int = 1) -> str:
    """The text of a build configuration for a model's ``config.json``.

    Args:
        tp: GPUs that share the heads of each layer (tensor parallelism).

    Raises:
        ConfigError: the file cannot be read, or podgraph cannot serve the model; one line that starts with the path.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_MODEL_BYTES + 1)
        if len(data) > MAX_MODEL_BYTES:
            raise ConfigError(f"too long for a model's config.json, allowed: at most {MAX_MODEL_BYTES} bytes")
        return config_for_model(json.loads(data), tp)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from e
    except (ValueError, RecursionError) as e:  # no text, no JSON, absurd numbers, absurd nesting
        raise ConfigError(f"{path}: not valid JSON: {str(e) or type(e).__name__}") from None
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


def config_for_model(document: object, tp: int = 1) -> str:
    """The text of a build configuration for the content of a model's ``config.json``.

    A model whose layers alternate gets two specifications, ``full`` and ``window``; any other gets one of them.

    Args:
        tp: GPUs that share the heads of each layer. Where there are more of them than KV heads, each holds one.

    Raises:
        ConfigError: podgraph cannot serve the model; one line with the key, what was got and what is allowed.
    """
    model = language_model(document)
    refuse_other_attention(model)
    layers = layers_of(model)
    specs = attention_specs(model, layers, tp)
    max_kv_len = model.integer(*LENGTH_KEYS) or DEFAULT_KV_LEN
    return TEMPLATE.format(
        title=_title(model),
        notes="".join(f"# {note}\n" for note in _notes(model, layers, tp)),
        specs="\n".join(_spec_text(name, spec) for name, spec in specs.items()),
        # what those slots cannot hold would be refused, or never be replayed
        prefill_len=f"{sorted({min(rows, PREFILL_SLOTS * max_kv_len) for rows in PREFILL_LENS})!s:<16}",
        max_pages=f"{max(MIN_PAGES, -(-max_kv_len // PAGE_SIZE)):<18}",
        max_kv_len=f"{max_kv_len:<17}",
        model=_model_text(model, layers, tp),
    )


def _title(model: Model) -> str:
    names = model.get("architectures")
    name = model.get("_name_or_path") or (names[0] if isinstance(names, list) and names else model.get("model_type"))
    return "".join(c if c.isprintable() else "?" for c in str(name or "A model"))[:80]


def _notes(model: Model, layers: Layers, tp: int) -> Iterator[str]:
    heads = model.heads
    if tp > 1:
        yield f"One of {tp} tensor-parallel ranks, with its share of {heads['num_attention_heads']} query heads."
    if tp > heads["num_key_value_heads"]:
        yield f"Every rank holds one of the {heads['num_key_value_heads']} KV heads, and shares it with others."
    if layers.full and layers.windowed:
        yield f"{layers.full} layers attend to everything (full), {layers.windowed} to a window (window)."
    if layers.others:
        yield f"{layers.others} more layers hold no KV cache: nothing is built for them."
    if model.get("dtype") is None:
        yield f"The model's file names no dtype: {DTYPES[0]} is a guess."
    if model.integer(*LENGTH_KEYS) is None:
        yield f"The model's file names no context length: max_kv_len {DEFAULT_KV_LEN} is a guess."
    if model.get("model_type") == "gpt_oss" or any("sink" in key and value for key, value in model.keys.items()):
        yield "The kernels know no attention sinks: scale each row of out by sigmoid(ln(2) * lse - sink) afterwards."


def _spec_text(name: str, spec: AttentionSpec) -> str:
    lines = [
        ("num_qo_heads", spec.num_qo_heads, "query heads on one GPU"),
        ("num_kv_heads", spec.num_kv_heads, "KV heads on one GPU"),
        ("head_dim", spec.head_dim, ""),
        ("page_size", spec.page_size, "tokens per KV page: your engine's"),
        ("dtype", spec.dtype, "of q and out, and of the KV cache; for an fp8 cache add kv_dtype: float8_e4m3fn"),
    ]
    if spec.sm_scale != replace(spec, sm_scale=0.0).sm_scale:
        lines.append(("sm_scale", _float(spec.sm_scale), "instead of 1/sqrt(head_dim)"))
    if spec.window_left >= 0:
        lines.append(("window_left", spec.window_left, "a row sees as many tokens before its own"))
    if spec.logits_soft_cap:
        lines.append(("logits_soft_cap", _float(spec.logits_soft_cap), "logits become cap * tanh(logits / cap)"))
    return "\n".join([f"  {name}:", *(_line(4, *line) for line in lines), ""])


def _float(value: float) -> str:
    """A float as every reader of YAML takes it for one, and for the same: to those of 1.1, ``1e-05`` is text."""
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")


def _line(indent: int, key: str, value: object, comment: str) -> str:
    text = f"{' ' * indent}{key}: {value}"
    return f"{text:<31} # {comment}" if comment else text


def _model_text(model: Model, layers: Layers, tp: int) -> str:
    """The section for the cost of whole steps, or a comment that says why there is none."""
    shape = model_shape(model, layers, tp)
    if isinstance(shape, str):
        return f"# No model section: {shape}.\n"
    lines = [
        ("num_layers", shape.num_layers, ""),
        ("hidden_size", shape.hidden_size, ""),
        ("intermediate_size", shape.intermediate_size, "of the MLP, on one GPU"),
        ("vocab_size", shape.vocab_size, "on one GPU"),
    ]
    head = "model:                          # what whole steps cost is estimated from it; nothing is built from it"
    return "\n".join([head, *(_line(2, *line) for line in lines), ""])
