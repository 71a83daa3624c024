"""What a model computes beside attention."""

from __future__ import annotations

from podgraph.models.document import Model
from podgraph.models.layers import Layers
from podgraph.schema import MAX_INT
from podgraph.shapes import ModelShape

# more than one of them: an MLP of which every token takes a part
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")


def model_shape(model: Model, layers: Layers, tp: int) -> ModelShape | str:
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
