"""config.json files as their families write them, and as no one should."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.errors import BadInput
from penteract.spec.hf_config import model_from_hf
from penteract.spec.model import ModelSpec
from penteract.spec.presets import preset

BASE: dict[str, Any] = {"hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False}

LLAMA_1B = BASE | {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "attention_bias": False,
    "mlp_bias": False, "tie_word_embeddings": True,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip
MISTRAL = BASE | {
    "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
}  # fmt: skip
QWEN3 = BASE | {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "attention_bias": False,
    "rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 28,
    "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL = MISTRAL | {
    "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02,
    "rope_theta": 1000000.0, "sliding_window": None,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001, "tie_word_embeddings": False, "max_window_layers": 48,
}  # fmt: skip
QWEN2 = QWEN3 | {"model_type": "qwen2", "head_dim": None, "max_window_layers": 21, "sliding_window": 4096}
FAMILIES = [LLAMA_1B, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE]


@pytest.mark.parametrize(
    ("name", "config"),
    [("llama-3.2-1b", LLAMA_1B), ("mistral-7b", MISTRAL), ("qwen3-0.6b", QWEN3), ("mixtral-8x7b", MIXTRAL),
     ("qwen3-30b-a3b", QWEN3_MOE)],
)  # fmt: skip
def test_published_files_are_the_catalogue(name: str, config: dict[str, Any]) -> None:
    assert model_from_hf(config | {"_name_or_path": f"org/{name}"}) == preset(name).model


def test_fields_that_only_some_families_have() -> None:
    qwen2 = model_from_hf(QWEN2)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm, qwen2.sliding_window) == (True, False, False, 0)
    assert qwen2.head_size == 64
    assert model_from_hf(QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}).sliding_window == 4096
    biased = model_from_hf(LLAMA_1B | {"attention_bias": True, "mlp_bias": True})
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)
    every = model_from_hf(QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False})
    assert every.moe is not None
    assert [every.has_experts(i) for i in range(6)] == [False, True, False, False, False, True]
    assert not every.moe.normalize_weights
    assert model_from_hf({k: v for k, v in LLAMA_1B.items() if k != "num_key_value_heads"}).kv_heads == 32


def test_newer_files_put_rope_in_one_table() -> None:
    newer = {k: v for k, v in LLAMA_1B.items() if k not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = LLAMA_1B["rope_scaling"] | {"rope_theta": 500000.0}
    assert model_from_hf(newer) == model_from_hf(LLAMA_1B)
    plain = newer | {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}
    assert (model_from_hf(plain).rope_theta, model_from_hf(plain).rope_scaling) == (7e5, None)


def test_a_path_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert model_from_hf(tmp_path) == model_from_hf(str(tmp_path / "config.json")) == model_from_hf(QWEN3)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model_type": "mamba"}, "CONFIG.*no such model_type.*found \"mamba\" / allowed llama"),
        ({"model_type": ["llama"]}, "CONFIG.*no such model_type"),
        ({"hidden_size": None}, "CONFIG.*no hidden_size"),
        ({"hidden_size": "2048"}, 'CONFIG.*hidden_size.*found "2048" / allowed a whole number'),
        ({"hidden_size": -1}, "CONFIG.*hidden_size.*found -1"),
        ({"hidden_size": 10**30}, "CONFIG.*hidden_size"),
        ({"hidden_size": 2049, "head_dim": None}, "CONFIG.*does not divide into heads.*add head_dim"),
        ({"num_hidden_layers": 16.0}, "CONFIG.*num_hidden_layers.*found 16.0"),
        ({"num_attention_heads": True}, "CONFIG.*num_attention_heads.*found true"),
        ({"rms_norm_eps": float("nan")}, "CONFIG.*rms_norm_eps.*found nan"),
        ({"rope_theta": float("inf")}, "CONFIG.*rope_theta"),
        ({"rope_theta": 10**400}, "CONFIG.*rope_theta"),
        ({"tie_word_embeddings": "yes"}, "CONFIG.*tie_word_embeddings.*true or false"),
        ({"hidden_act": "relu"}, "UNSAID.*hidden_act · found \"relu\" / allowed silu"),
        ({"rope_scaling": "yarn"}, "CONFIG.*rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "UNSAID.*found \"yarn\" / allowed llama3"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "CONFIG.*rope_scaling · found no factor"),
        ({"rope_scaling": {"rope_type": {"a": 1}}}, "UNSAID"),
        ({"hidden_act": {"a": [1] * 1000}}, "UNSAID"),
    ],
)  # fmt: skip
def test_one_line_names_the_field(change: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput, match=line) as caught:
        model_from_hf(LLAMA_1B | change)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok.*found 129 / allowed 1 to 128"),
        ({"mlp_only_layers": 3}, "mlp_only_layers.*a list"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ({"use_sliding_window": True, "max_window_layers": 5}, "UNSAID.*max_window_layers"),
        ({"num_key_value_heads": None}, "no num_key_value_heads"),
    ],
)
def test_one_line_names_the_experts_field(change: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput, match=line):
        model_from_hf(QWEN3_MOE | change)


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "{", "[" * 100_000, '{"a":' * 50_000, '{"hidden_size": ' + "9" * 6000 + "}", "\0"]
)
def test_files_that_are_no_config(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(BadInput, match="CONFIG"):
        model_from_hf(path)
    with pytest.raises(BadInput, match="FILE"):
        model_from_hf(tmp_path / "none.json")


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from([10**400, 2**24])
)
JUNK = ATOMS | st.lists(ATOMS, max_size=3) | st.dictionaries(st.text(max_size=5), ATOMS | st.lists(ATOMS), max_size=3)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_junk_in_any_field_is_a_model_or_one_line(data: st.DataObject) -> None:
    config = dict(data.draw(st.sampled_from(FAMILIES)))
    for name in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[name] = data.draw(JUNK)
    started = time.process_time()
    try:
        assert isinstance(model_from_hf(config), ModelSpec)
    except BadInput as error:
        assert error.code in ("CONFIG", "UNSAID")
        assert "\n" not in str(error)
        assert len(str(error)) < 500
    assert time.process_time() - started < 0.5
