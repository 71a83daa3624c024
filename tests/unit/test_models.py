"""Configurations written from a model's config.json."""

from __future__ import annotations

import re
from typing import Any

import pytest

from podgraph.config import parse_config
from podgraph.errors import ConfigError
from podgraph.models import config_for_model
from podgraph.shapes import ModelShape

LLAMA3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
GEMMA2_9B = {
    "model_type": "gemma2",
    "head_dim": 256,
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "dtype": "bfloat16",
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 8192,
}
MISTRAL_7B = LLAMA3_8B | {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768}
GPT_OSS = LLAMA3_8B | {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "num_attention_heads": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize(
    ("document", "tp", "want"),
    [
        pytest.param(LLAMA3_8B, 1, {"full": (32, 8, 128, -1, 0.0)}, id="llama3-8b"),
        pytest.param(LLAMA3_8B, 2, {"full": (16, 4, 128, -1, 0.0)}, id="two ranks"),
        pytest.param(LLAMA3_8B, 16, {"full": (2, 1, 128, -1, 0.0)}, id="KV heads replicated"),
        pytest.param(
            GEMMA2_9B, 1, {"full": (16, 8, 256, -1, 50.0), "window": (16, 8, 256, 4095, 50.0)}, id="alternating windows"
        ),
        pytest.param(MISTRAL_7B, 1, {"window": (32, 8, 128, 4095, 0.0)}, id="window everywhere"),
        pytest.param(GPT_OSS, 1, {"full": (64, 8, 64, -1, 0.0), "window": (64, 8, 64, 127, 0.0)}, id="layer types"),
        pytest.param({"text_config": LLAMA3_8B}, 1, {"full": (32, 8, 128, -1, 0.0)}, id="nested text_config"),
    ],
)
def test_specs_of_a_model(document: dict[str, Any], tp: int, want: dict[str, tuple[float, ...]]) -> None:
    config = parse_config(config_for_model(document, tp).encode(), "written.yaml")
    got = {
        name: (s.num_qo_heads, s.num_kv_heads, s.head_dim, s.window_left, s.logits_soft_cap)
        for name, s in config.specs.items()
    }
    assert got == want
    assert config.buckets


DENSE = LLAMA3_8B | {"num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128257}


@pytest.mark.parametrize(
    ("change", "tp", "want"),
    [
        pytest.param({}, 1, ModelShape(32, 4096, 14336, 128257), id="one GPU"),
        pytest.param({}, 2, ModelShape(32, 4096, 7168, 64129), id="two GPUs, rounded up"),
        pytest.param(
            {"num_experts": 0, "num_local_experts": 1}, 1, ModelShape(32, 4096, 14336, 128257), id="no experts"
        ),
        pytest.param({"vocab_size": None}, 1, "a single vocab_size", id="no vocab_size"),
        pytest.param({"intermediate_size": [1, 2]}, 1, "a single intermediate_size", id="a size for each layer"),
        pytest.param({"num_local_experts": 8}, 1, "mixtures of experts", id="Mixtral"),
        pytest.param({"n_routed_experts": 64}, 1, "mixtures of experts", id="DeepSeek"),
        pytest.param({"num_experts": 128}, 1, "mixtures of experts", id="Qwen3"),
        pytest.param({"moe_num_experts": [64, 64]}, 1, "mixtures of experts", id="Ernie"),
        pytest.param({"model_type": "granitemoehybrid"}, 1, "mixtures of experts", id="by name"),
        pytest.param({"layer_types": ["full_attention", "mamba"]}, 1, "layers without a KV cache", id="hybrid"),
    ],
)
def test_the_shape_of_a_dense_model(change: dict[str, Any], tp: int, want: ModelShape | str) -> None:
    text = config_for_model(DENSE | change, tp)
    model = parse_config(text.encode(), "written.yaml").model
    if isinstance(want, ModelShape):
        assert model == want
    else:
        assert model is None
        assert re.search(rf"^# No model section: .*{want}", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"kv_lora_rank": 512}, "kv_lora_rank", id="latent attention"),
        pytest.param({"head_dim": 96}, "head_dim", id="head dim"),
        pytest.param({"torch_dtype": "float32"}, "dtype", id="float32"),
        pytest.param({"num_attention_heads": None}, "num_attention_heads", id="no heads"),
    ],
)
def test_what_no_kernel_computes_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_for_model(LLAMA3_8B | change, 1)


@pytest.mark.parametrize("document", [{}, [1], "text", None], ids=str)
def test_what_is_no_model_is_refused(document: Any) -> None:
    with pytest.raises(ConfigError):
        config_for_model(document, 1)
