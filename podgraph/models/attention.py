"""The attention that a model computes, or the name of what the kernels do not."""

from __future__ import annotations

import math
from dataclasses import replace

from podgraph.errors import ConfigError
from podgraph.models.document import Model
from podgraph.models.layers import Layers
from podgraph.quoting import shown
from podgraph.shapes import DTYPES, AttentionSpec

PAGE_SIZE = 16
FLOAT32_ROUNDING = 2.0**-24

UNSCALED_MODELS = ("gemma3n_text",)  # queries and keys are normalised instead
ALIBI_MODELS = ("bloom",)
OTHER_HEADS_MODELS = ("gemma4_text",)

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


def refuse_other_attention(model: Model) -> None:
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


def attention_specs(model: Model, layers: Layers, tp: int) -> dict[str, AttentionSpec]:
    """``full`` and ``window``, whichever of them the model has layers for, on one of ``tp`` GPUs."""
    spec = _spec(model, tp)
    specs = {"full": spec} if layers.full else {}
    if layers.windowed:
        # transformers' window counts the row's own position, window_left only those before it
        specs["window"] = replace(spec, window_left=layers.window - 1)
    return specs


def _spec(model: Model, tp: int) -> AttentionSpec:
    heads, kv_heads, head_dim = model.heads.values()
    if tp < 1 or heads % tp:
        raise ConfigError(f"tp: got {shown(tp)}, allowed: a divisor of num_attention_heads = {heads}")
    if kv_heads % tp and tp % kv_heads:
        raise ConfigError(f"tp: got {shown(tp)}, allowed: a divisor or a multiple of num_key_value_heads = {kv_heads}")
    dtype = str(model.get("dtype") or DTYPES[0]).removeprefix("torch.")
    if dtype not in DTYPES:
        raise model.refuse("dtype", "no kernel computes it", dtype, f"{' or '.join(DTYPES)}, whichever you serve in")
    spec = AttentionSpec(
        num_qo_heads=heads // tp,
        num_kv_heads=max(1, kv_heads // tp),
        head_dim=head_dim,
        page_size=PAGE_SIZE,
        dtype=dtype,
        sm_scale=_sm_scale(model, head_dim),
        logits_soft_cap=model.number("attn_logit_softcapping") or 0.0,
    )
    for name, got, allowed in spec.limits():
        raise model.refuse(name, "no kernel serves it", got, allowed)
    return spec


def _sm_scale(model: Model, head_dim: int) -> float:
    """0 stands for ``1/sqrt(head_dim)``, `AttentionSpec`'s default."""
    scalar = model.number("query_pre_attn_scalar")
    if scalar is not None:
        scale = float(scalar**-0.5)
    else:
        scale = model.number("attention_multiplier") or (1.0 if model.get("model_type") in UNSCALED_MODELS else 0.0)
    # kernels take it as float32: what rounds to the default there is the default
    return 0.0 if math.isclose(scale, head_dim**-0.5, rel_tol=FLOAT32_ROUNDING) else scale
