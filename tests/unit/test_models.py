"""Configurations written from a model's config.json."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from podgraph.config import parse_config
from podgraph.errors import ConfigError
from podgraph.models import config_for_model, config_from_file
from podgraph.models.attention import attention_specs
from podgraph.models.document import language_model
from podgraph.models.layers import layers_of
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


@pytest.mark.parametrize(
    ("change", "want", "written"),
    [
        pytest.param({}, 1 / math.sqrt(128), "", id="none"),
        pytest.param({"query_pre_attn_scalar": 128}, 1 / math.sqrt(128), "", id="the default's own"),
        pytest.param({"attention_multiplier": 0.08838834764831843}, 1 / math.sqrt(128), "", id="last digit"),
        pytest.param({"attention_multiplier": 0.0883883461}, 1 / math.sqrt(128), "", id="same in float32"),
        pytest.param({"attention_multiplier": 0.0883884}, 0.0883884, "0.0883884", id="another"),
        pytest.param({"query_pre_attn_scalar": 144}, 144**-0.5, "0.08333333333333333", id="Gemma 2 27B"),
        pytest.param({"attention_multiplier": 1e-5}, 1e-5, "1.0e-05", id="no point in its digits"),
        pytest.param({"attention_multiplier": 1e15}, 1e15, "1000000000000000.0", id="large"),
        pytest.param({"model_type": "gemma3n_text"}, 1.0, "1.0", id="unscaled"),
    ],
)
def test_scales_are_read_back_as_they_were_computed(change: dict[str, Any], want: float, written: str) -> None:
    text = config_for_model(LLAMA3_8B | change)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("    sm_scale:")] == [written][
        : bool(written)
    ]
    (spec,) = parse_config(text.encode(), "written.yaml").specs.values()
    assert spec.sm_scale == want


@pytest.mark.parametrize(
    ("length", "prefill_len"),
    [(1, (8,)), (2, (16,)), (31, (248,)), (32, (256,)), (100, (256, 800)), (128, (256, 1024)), (1 << 24, (256, 1024))],
)
def test_prefills_are_no_longer_than_the_context_of_their_slots(length: int, prefill_len: tuple[int, ...]) -> None:
    config = parse_config(config_for_model(LLAMA3_8B | {"max_position_embeddings": length}).encode(), "written.yaml")
    assert config.space.prefill_len == prefill_len
    assert config.workspace.max_kv_len == length
    assert {bucket.family for bucket in config.buckets} == {"decode", "mixed", "prefill"}


SIZE = st.one_of(st.integers(1, 64), st.integers(1, 1 << 24), st.sampled_from([1, 4096, 128256, 1 << 24, 0, 1 << 25]))
NUMBER = st.one_of(st.floats(1e-9, 1e9), st.sampled_from([50, 64, 128.0, 256, 0.08838834764831845, 1e-5, 1e15, 0]))
LAYER = st.sampled_from(["full_attention", "sliding_attention", "linear_attention", "mamba"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
PLAUSIBLE = {
    "model_type": st.sampled_from(["llama", "gemma2", "gemma3_text", "gemma3n_text", "gpt_oss", "qwen3_moe", "bloom"]),
    "architectures": st.lists(st.text(max_size=100), max_size=2),
    "num_attention_heads": st.sampled_from([16, 32, 64]),
    "num_key_value_heads": st.sampled_from([4, 8, 16]),
    "head_dim": st.sampled_from([64, 128, 256]),
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "vocab_size": SIZE,
    "num_hidden_layers": st.integers(1, 100),
    "num_local_experts": st.integers(0, 8),
    "max_position_embeddings": SIZE,
    "torch_dtype": st.sampled_from(["bfloat16", "float16", "torch.bfloat16", "float32"]),
    "sliding_window": SIZE,
    "use_sliding_window": st.booleans(),
    "max_window_layers": SIZE,
    "sliding_window_pattern": SIZE | st.text("LGX", max_size=5),
    "layer_types": st.lists(LAYER, max_size=6),
    "query_pre_attn_scalar": NUMBER,
    "attention_multiplier": NUMBER,
    "attn_logit_softcapping": NUMBER,
    "multi_query": st.booleans(),
    "attention_sink": st.booleans(),
}
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
SHAPE = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")


@st.composite
def models(draw: st.DrawFn) -> Any:
    """Documents that could be a model's, at times with one value of any kind, or inside another document."""
    names = {*HEADS, *draw(st.sampled_from([SHAPE, ()]))}
    names |= draw(st.sets(st.sampled_from([name for name in PLAUSIBLE if name not in names]), max_size=5))
    document = draw(st.fixed_dictionaries({name: PLAUSIBLE[name] for name in PLAUSIBLE if name in names}))
    if draw(st.integers(0, 4)) == 4:
        document[draw(st.sampled_from(sorted(PLAUSIBLE)))] = draw(ANYTHING)
    return {"text_config": document} if draw(st.integers(0, 4)) == 4 else document


@settings(deadline=None, derandomize=True, max_examples=400)
@given(document=models(), tp=st.sampled_from([1, 2, 4, 16, 3]))
def test_whatever_is_written_is_read_back_exactly(document: Any, tp: int) -> None:
    try:
        text = config_for_model(document, tp)
    except ConfigError as e:
        assert "\n" not in str(e)
        assert len(str(e)) < 1000
        return
    config = parse_config(text.encode(), "written.yaml")
    model = language_model(document)
    assert dict(config.specs) == attention_specs(model, layers_of(model), tp)
    assert config.workspace.max_kv_len == (model.get("max_position_embeddings") or 32768)
    if config.model is not None:
        assert (config.model.num_layers, config.model.hidden_size) == (
            model.get("num_hidden_layers"),
            model.get("hidden_size"),
        )
        assert 0 <= config.model.intermediate_size * tp - model.get("intermediate_size") < tp
        assert 0 <= config.model.vocab_size * tp - model.get("vocab_size") < tp
    for name, spec in yaml.safe_load(text)["specs"].items():  # another reader takes every value for the same
        got = dataclasses.asdict(config.specs[name])
        assert {key: got[key] for key in spec} == spec
        assert all(type(got[key]) is type(value) for key, value in spec.items())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        ("{", "not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"\xff\x00\x01", "not valid JSON: "),
        ('{"num_attention_heads": ' + "9" * 5000 + "}", "not valid JSON: "),
        ("[" * 100_000, "not valid JSON: "),
        (
            '{"text_config":' * 400 + "{}" + "}" * 400,
            "text_config.text_config.text_config.text_config.num_attention_heads",
        ),
        (" " * ((8 << 20) + 1), "too long for a model's config.json, allowed: at most 8388608 bytes"),
    ],
    ids=["empty", "cut", "binary", "absurd number", "brackets", "nested", "too long"],
)
def test_files_of_something_else_are_refused_in_one_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as raised:
        config_from_file(path)
    assert str(raised.value).startswith(f"{path}: {message}")
    assert "\n" not in str(raised.value)


def test_a_file_is_read_in_its_encoding(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA3_8B | {"architectures": ["Modèle\ud800\n- #x"]}))
    assert config_from_file(path).startswith("# Modèle??- #x. Written by")
