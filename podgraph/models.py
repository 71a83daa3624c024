"""A model's ``config.json`` (Hugging Face's keys) -> the text of a build configuration.

Every value is either taken over or refused by name: a mask, a scale or a head that the kernels do not compute must not
turn into a catalog that computes something else.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from podgraph.errors import ConfigError
from podgraph.schema import MAX_INT, key_path, shown
from podgraph.shapes import DTYPES, AttentionSpec, ModelShape

MAX_LAYERS = 4096
MAX_MODEL_BYTES = 8 << 20  # quantised checkpoints list their layers in this file
PAGE_SIZE = 16
MIN_PAGES = 65_536
DEFAULT_KV_LEN = 32_768

TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
LENGTH_KEYS = ("max_position_embeddings", "seq_length", "n_positions", "model_max_length")
KV_HEAD_KEYS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
WINDOW_KEYS = ("sliding_window", "sliding_window_size", "attention_window_size")
PATTERN_KEYS = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")

FULL_LAYERS = ("full_attention", "attention")
WINDOW_LAYERS = ("sliding_attention",)
OTHER_LAYERS = ("linear_attention", "mamba", "conv", "recurrent")  # they hold no KV cache

# what transformers' classes do where a file does not say it: every n-th layer is not windowed
PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3n_text": 5, "cohere2": 4, "exaone4": 4, "gpt_oss": 2, "olmo3": 4}
UNSCALED_MODELS = ("gemma3n_text",)  # queries and keys are normalised instead
ALIBI_MODELS = ("bloom",)
OTHER_HEADS_MODELS = ("gemma4_text",)

# more than one of them: an MLP of which every token takes a part
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")

# keys that stand for another kind of attention wherever they are set
UNSUPPORTED = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "alibi": "ALiBi",
    "use_alibi": "ALiBi",
    "attention_chunk_size": "chunked attention",
    "is_encoder_decoder": "cross attention",
    "use_bidirectional_attention": "bidirectional attention",
    "block_configs": "other heads in some layers",
    "per_layer_config": "other heads in some layers",
    "num_key_value_heads_per_layer": "other heads in some layers",
}
# keys that do so where they differ from the usual one
OTHER_HEADS = {
    "global_head_dim": "head_dim",
    "swa_head_dim": "head_dim",
    "v_head_dim": "head_dim",
    "num_global_key_value_heads": "num_key_value_heads",
    "swa_num_key_value_heads": "num_key_value_heads",
    "swa_num_attention_heads": "num_attention_heads",
}

TEMPLATE = """\
# {title}. Written by `podgraph config`: edit the buckets to the steps that your engine makes.
{notes}
specs:
{specs}
# Every (batch, prefill_len, decode_count) with a slot for prefill becomes a bucket, and each side alone as well.
buckets:
  batch: [8, 16, 72]            # request slots in all: decodes, and at least one prefill
  prefill_len: [256, 1024]      # query rows of prefill in one step, over all requests
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
    model = _language_model(document)
    _refuse_other_attention(model)
    spec = _spec(model, tp)
    layers = _layers(model)
    specs = {"full": spec} if layers.full else {}
    if layers.windowed:
        # transformers' window counts the row's own position, window_left only those before it
        specs["window"] = replace(spec, window_left=layers.window - 1)
    max_kv_len = model.integer(*LENGTH_KEYS) or DEFAULT_KV_LEN
    return TEMPLATE.format(
        title=_title(model),
        notes="".join(f"# {note}\n" for note in _notes(model, layers, tp)),
        specs="\n".join(_spec_text(name, spec) for name, spec in specs.items()),
        max_pages=f"{max(MIN_PAGES, -(-max_kv_len // PAGE_SIZE)):<18}",
        max_kv_len=f"{max_kv_len:<17}",
        model=_model_text(model, layers, tp),
    )


def save(text: str, path: str | Path) -> None:
    """Writes a text file, whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".podgraph-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {e.strerror or e}") from e


@dataclass(frozen=True)
class _Model:
    """The keys of a language model, and where they stand in the file. A null is the same as no key."""

    keys: dict[str, Any]
    path: tuple[str, ...]

    def get(self, *names: str) -> Any:
        """The value of the first of these keys that is there."""
        return next((self.keys[name] for name in names if self.keys.get(name) is not None), None)

    def integer(self, *names: str, most: int = MAX_INT) -> int | None:
        """A positive integer, or None where there is none of these keys."""
        value = self.get(*names)
        if value is None:
            return None
        if type(value) is not int or not 0 < value <= most:
            name = next(name for name in names if self.keys.get(name) is not None)
            raise self.refuse(name, "not a size", value, f"1 to {most}")
        return value

    def number(self, name: str) -> float | None:
        """A positive number, or None where there is no such key."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 < value < 1e30:
            raise self.refuse(name, "not a number of a usual size", value, "a number above 0")
        return float(value)

    def needs(self, name: str) -> int:
        value = self.integer(name)
        if value is None:
            raise ConfigError(f"{key_path([*self.path, name])}: missing; add it from the model's documentation")
        return value

    def refuse(self, name: str, problem: str, got: object, allowed: str) -> ConfigError:
        return ConfigError(f"{key_path([*self.path, name])}: {problem}, got {shown(got)}, allowed: {allowed}")

    @property
    def heads(self) -> dict[str, int]:
        """Query heads, KV heads and their size, by transformers' names."""
        heads = self.needs("num_attention_heads")
        # Falcon's newer models set multi_query too, and do not mean it
        multi_query = self.get("multi_query") is True and not self.get("new_decoder_architecture")
        head_dim = self.integer("head_dim")
        if head_dim is None:
            hidden_size = self.needs("hidden_size")
            if hidden_size % heads:
                allowed = f"a multiple of num_attention_heads = {heads}, or a head_dim"
                raise self.refuse("hidden_size", "gives no head_dim", hidden_size, allowed)
            head_dim = hidden_size // heads
        kv_heads = 1 if multi_query else self.integer(*KV_HEAD_KEYS) or heads
        return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


@dataclass(frozen=True)
class _Layers:
    """How many layers attend to everything, to a window, and without a KV cache.

    Attributes:
        window: positions that a row of a windowed layer sees, its own among them.
    """

    full: int
    windowed: int
    others: int
    window: int


def _language_model(document: object) -> _Model:
    """Descends to the keys of the language model in a file of several modalities."""
    if not isinstance(document, dict):
        raise ConfigError(f"got {shown(document)}, allowed: a model's config.json, an object with num_attention_heads")
    keys, dtype = document, None
    path: list[str] = []
    while True:
        dtype = keys.get("torch_dtype") or keys.get("dtype") or dtype
        name = next((name for name in TEXT_KEYS if isinstance(keys.get(name), dict)), None)
        if name is None:
            return _Model({**keys, "dtype": dtype}, tuple(path))
        keys = keys[name]
        path.append(name)


def _refuse_other_attention(model: _Model) -> None:
    """Refuses, by name, what the kernels would silently compute as plain causal attention."""
    for name, what in UNSUPPORTED.items():
        got = model.get(name)
        if got and got != "vision":  # images alone are seen in both directions: the prompt's text is not
            raise model.refuse(name, f"{what} is not supported", got, "models without it")
    kind, nested = model.get("model_type"), model.get("attn_config")
    alibi = kind in ALIBI_MODELS or (kind == "baichuan" and model.get("hidden_size") == 5120)  # the smaller one rotates
    alibi |= isinstance(nested, dict) and bool(nested.get("alibi"))
    if alibi or model.get("position_embedding_type") == "alibi":
        raise model.refuse("model_type", "ALiBi is not supported", kind, "models without it")
    if kind in OTHER_HEADS_MODELS:
        raise model.refuse("model_type", "other heads in some layers are not supported", kind, "models without them")
    for name, usual in OTHER_HEADS.items():
        got = model.get(name)
        if got is not None and got != model.heads[usual]:
            raise model.refuse(name, "other heads are not supported", got, f"{usual} = {model.heads[usual]}")


def _spec(model: _Model, tp: int) -> AttentionSpec:
    heads, kv_heads, head_dim = model.heads.values()
    if tp < 1 or heads % tp:
        raise ConfigError(f"tp: got {tp}, allowed: a divisor of num_attention_heads = {heads}")
    if kv_heads % tp and tp % kv_heads:
        raise ConfigError(f"tp: got {tp}, allowed: a divisor or a multiple of num_key_value_heads = {kv_heads}")
    dtype = str(model.get("dtype") or DTYPES[0]).removeprefix("torch.")
    if dtype not in DTYPES:
        raise model.refuse("dtype", "no kernel computes it", dtype, f"{' or '.join(DTYPES)}, whichever you serve in")
    spec = AttentionSpec(
        num_qo_heads=heads // tp,
        num_kv_heads=max(1, kv_heads // tp),
        head_dim=head_dim,
        page_size=PAGE_SIZE,
        dtype=dtype,
        sm_scale=_sm_scale(model),
        logits_soft_cap=model.number("attn_logit_softcapping") or 0.0,
    )
    for name, got, allowed in spec.limits():
        raise model.refuse(name, "no kernel serves it", got, allowed)
    return spec


def _sm_scale(model: _Model) -> float:
    """0 stands for ``1/sqrt(head_dim)``, `AttentionSpec`'s default."""
    scalar = model.number("query_pre_attn_scalar")
    if scalar is not None:
        return float(scalar**-0.5)
    return model.number("attention_multiplier") or (1.0 if model.get("model_type") in UNSCALED_MODELS else 0.0)


def _layers(model: _Model) -> _Layers:
    window = model.integer(*WINDOW_KEYS) or 0
    length = model.integer(*LENGTH_KEYS)
    unlimited = model.get("use_sliding_window") is False or (length is not None and window >= length)
    kinds = list(_layer_types(model, window if not unlimited else 0))
    windowed = 0 if unlimited else sum(kind in WINDOW_LAYERS for kind in kinds)
    if windowed and not window:
        raise ConfigError(f"{key_path([*model.path, WINDOW_KEYS[0]])}: missing, and layer_types has {WINDOW_LAYERS[0]}")
    others = sum(kind in OTHER_LAYERS for kind in kinds)
    if others == len(kinds):
        raise model.refuse("layer_types", "no layer attends to a KV cache", kinds, FULL_LAYERS[0])
    return _Layers(len(kinds) - others - windowed, windowed, others, window)


def _layer_types(model: _Model, window: int) -> Iterator[str]:
    """What each layer does, in transformers' words; a file without ``layer_types`` says it by a rule."""
    types = model.get("layer_types", "layers_block_type")
    if types is not None:
        allowed = (*FULL_LAYERS, *WINDOW_LAYERS, *OTHER_LAYERS)
        for kind in types if isinstance(types, list) and types else [types]:
            if not isinstance(kind, str) or kind not in allowed:
                raise model.refuse("layer_types", "not supported", kind, f"a list of {', '.join(allowed)}")
            yield kind
        return
    pattern = model.get(*PATTERN_KEYS) or PATTERNS.get(str(model.get("model_type")))
    first = model.get("max_window_layers") if model.get("use_sliding_window") else 0
    if isinstance(pattern, str):  # such as LLLG
        if not pattern or set(pattern) - {"L", "G"}:
            raise model.refuse(PATTERN_KEYS[0], "unknown letters", pattern, "L (window) and G (full)")
        full = [letter == "G" for letter in pattern]
    elif pattern is not None:
        full = [False] * (model.integer(*PATTERN_KEYS, most=MAX_LAYERS) or pattern)
        full[-1] = True
    else:
        full = [False]
    for i in range(model.integer("num_hidden_layers", most=MAX_LAYERS) or len(full)):
        in_range = type(first) is not int or i >= first
        yield WINDOW_LAYERS[0] if window and in_range and not full[i % len(full)] else FULL_LAYERS[0]


def _title(model: _Model) -> str:
    names = model.get("architectures")
    name = model.get("_name_or_path") or (names[0] if isinstance(names, list) and names else model.get("model_type"))
    return "".join(c if c.isprintable() else "?" for c in str(name or "A model"))[:80]


def _notes(model: _Model, layers: _Layers, tp: int) -> Iterator[str]:
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
    if not math.isclose(spec.sm_scale, spec.head_dim**-0.5, rel_tol=1e-9):
        lines.append(("sm_scale", spec.sm_scale, "instead of 1/sqrt(head_dim)"))
    if spec.window_left >= 0:
        lines.append(("window_left", spec.window_left, "a row sees as many tokens before its own"))
    if spec.logits_soft_cap:
        lines.append(("logits_soft_cap", spec.logits_soft_cap, "logits become cap * tanh(logits / cap)"))
    return "\n".join([f"  {name}:", *(_line(4, *line) for line in lines), ""])


def _line(indent: int, key: str, value: object, comment: str) -> str:
    text = f"{' ' * indent}{key}: {value}"
    return f"{text:<31} # {comment}" if comment else text


def _model_text(model: _Model, layers: _Layers, tp: int) -> str:
    """The section for the cost of whole steps, or a comment that says why there is none."""
    shape = _shape(model, layers, tp)
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


def _shape(model: _Model, layers: _Layers, tp: int) -> ModelShape | str:
    """What the model computes beside attention on one GPU, or why its steps are not modelled."""
    if (
        any(model.get(name) not in (None, 0, 1) for name in EXPERT_KEYS)
        or "moe" in str(model.get("model_type")).lower()
    ):
        return "step costs are not modelled for mixtures of experts"
    if layers.others:
        return "step costs are not modelled for layers without a KV cache"
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
    for name in names:
        # not an error: no kernel depends on it, and some models have a size for each layer
        if type(size := model.get(name)) is not int or not 0 < size <= MAX_INT:
            return f"step costs need a single {name}, and the model's file has none"
    num_layers, hidden_size, intermediate_size, vocab_size = (model.keys[name] for name in names)
    return ModelShape(num_layers, hidden_size, -(-intermediate_size // tp), -(-vocab_size // tp))
