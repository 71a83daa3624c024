"""The keys of a model's ``config.json``, by transformers' names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from podgraph.errors import ConfigError
from podgraph.quoting import key_path, shown
from podgraph.schema import MAX_INT
from podgraph.shapes import SCALES

MAX_NESTING = 4  # of one modality in another
TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
LENGTH_KEYS = ("max_position_embeddings", "seq_length", "n_positions", "model_max_length")
KV_HEAD_KEYS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")


@dataclass(frozen=True)
class Model:
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
        if isinstance(value, bool) or not isinstance(value, int | float) or not SCALES[0] <= value <= SCALES[1]:
            raise self.refuse(name, "not a number of a usual size", value, "{:g} to {:g}".format(*SCALES))
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


def language_model(document: object) -> Model:
    """Descends to the keys of the language model in a file of several modalities."""
    if not isinstance(document, dict):
        raise ConfigError(f"got {shown(document)}, allowed: a model's config.json, an object with num_attention_heads")
    keys, dtype = document, None
    path: list[str] = []
    while True:
        dtype = keys.get("torch_dtype") or keys.get("dtype") or dtype
        name = next((name for name in TEXT_KEYS if isinstance(keys.get(name), dict)), None)
        if name is None or len(path) == MAX_NESTING:
            return Model({**keys, "dtype": dtype}, tuple(path))
        keys = keys[name]
        path.append(name)
