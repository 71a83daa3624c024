"""Which layers of a model attend to everything, to a window, or to nothing that is cached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from podgraph.errors import ConfigError
from podgraph.models.document import LENGTH_KEYS, Model
from podgraph.quoting import key_path

MAX_LAYERS = 4096
WINDOW_KEYS = ("sliding_window", "sliding_window_size", "attention_window_size")
PATTERN_KEYS = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")

FULL_LAYERS = ("full_attention", "attention")
WINDOW_LAYERS = ("sliding_attention",)
OTHER_LAYERS = ("linear_attention", "mamba", "conv", "recurrent")  # they hold no KV cache

# what transformers' classes do where a file does not say it: every n-th layer is not windowed
PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3n_text": 5, "cohere2": 4, "exaone4": 4, "gpt_oss": 2, "olmo3": 4}


@dataclass(frozen=True)
class Layers:
    """How many layers attend to everything, to a window, and without a KV cache.

    Attributes:
        window: positions that a row of a windowed layer sees, its own among them.
    """

    full: int
    windowed: int
    others: int
    window: int


def layers_of(model: Model) -> Layers:
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
    return Layers(len(kinds) - others - windowed, windowed, others, window)


def _layer_types(model: Model, window: int) -> Iterator[str]:
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
