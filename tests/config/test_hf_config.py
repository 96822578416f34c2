"""config.json files as their families write them, and as no one should."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config.published import PUBLISHED
from penteract.config.hf import model_from_hf
from penteract.config.layout import Layout
from penteract.config.rules.breaches import breaches
from penteract.config.rules.case import Case
from penteract.errors import BadInput

LLAMA_1B, MISTRAL, QWEN3, QWEN3_MOE = (
    PUBLISHED[name] for name in ("llama-3.2-1b", "mistral-7b-v0.1", "qwen3-0.6b", "qwen3-30b-a3b")
)
QWEN2 = PUBLISHED["qwen2.5-0.5b"]
GPT2, LITE, V2, V3 = (PUBLISHED[name] for name in ("gpt2", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3"))
FAMILIES = [LLAMA_1B, MISTRAL, QWEN2, QWEN3, PUBLISHED["mixtral-8x7b"], QWEN3_MOE, GPT2, LITE, V2, V3]


def test_fields_that_only_some_families_have() -> None:
    qwen2 = model_from_hf(QWEN2)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm, qwen2.sliding_window) == (True, False, False, 0)
    assert qwen2.head_size == 64
    window = {"use_sliding_window": True, "sliding_window": 4096}
    assert model_from_hf(QWEN2 | window | {"max_window_layers": 0}).sliding_window == 4096
    assert model_from_hf(QWEN2 | window | {"layer_types": ["full_attention"] * 24}).sliding_window == 0
    assert model_from_hf(QWEN2 | window | {"layer_types": ["sliding_attention"] * 24}).sliding_window == 4096
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
        ({"hidden_act": "relu"}, "UNSUPPORTED.*hidden_act · found \"relu\" / allowed silu"),
        ({"rope_scaling": "yarn"}, "CONFIG.*rope_scaling"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "UNSUPPORTED.*dynamic. / allowed default"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "CONFIG.*factor.*found 0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "UNSUPPORTED.*truncate"),
        ({"rope_scaling": {"rope_type": "linear"}}, "CONFIG.*no factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "UNSUPPORTED.*differ from layer to layer"),
        ({"partial_rotary_factor": 0.5}, "UNSUPPORTED.*partial_rotary_factor.*found 0.5"),
        ({"num_key_value_heads": 5}, "CONFIG.*num_key_value_heads.*found 5 / allowed a divisor of the 32 heads"),
        ({"head_dim": 63}, "CONFIG.*head_dim.*found 63 / allowed an even number"),
        ({"text_config": {"hidden_size": 8}}, "UNSUPPORTED.*text_config"),
        ({"hidden_size": [10**5000]}, "CONFIG.*hidden_size.*what cannot be printed"),
        ({"hidden_size": [[[[8]]]]}, "CONFIG.*hidden_size"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "CONFIG.*rope_scaling · found no factor"),
        ({"rope_scaling": {"rope_type": {"a": 1}}}, "UNSUPPORTED"),
        ({"hidden_act": {"a": [1] * 1000}}, "UNSUPPORTED"),
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
        ({"mlp_only_layers": [1] * 20_000}, "mlp_only_layers.*found more / allowed at most 1024"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "UNSUPPORTED.*layer_types"),
        ({"layer_types": 7}, "UNSUPPORTED.*layer_types"),
        ({"use_sliding_window": True, "max_window_layers": 5}, "UNSUPPORTED.*max_window_layers"),
        ({"num_key_value_heads": None}, "no num_key_value_heads"),
    ],
)
def test_one_line_names_the_experts_field(change: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput, match=line):
        model_from_hf(QWEN3_MOE | change)


@pytest.mark.parametrize(
    ("config", "change", "line"),
    [
        (GPT2, {"activation_function": "relu"}, "UNSUPPORTED.*activation_function"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "UNSUPPORTED.*scaled by depth"),
        (GPT2, {"add_cross_attention": True}, "UNSUPPORTED.*another sequence"),
        (GPT2, {"n_head": 7}, "CONFIG.*n_head.*found 7 / allowed a divisor of n_embd = 768"),
        (GPT2, {"n_positions": None}, "CONFIG.*no n_positions"),
        (V3, {"kv_lora_rank": None}, "CONFIG.*no kv_lora_rank"),
        (V3, {"kv_lora_rank": 0}, "CONFIG.*kv_lora_rank.*found 0"),
        (V3, {"qk_rope_head_dim": 63}, "CONFIG.*qk_rope_head_dim.*even"),
        (V3, {"num_key_value_heads": 8}, "CONFIG.*num_key_value_heads.*found 8 / allowed 128"),
        (V3, {"topk_method": "hash"}, "UNSUPPORTED.*topk_method.*allowed greedy or group_limited_greedy or noaux_tc"),
        (V3, {"scoring_func": "sqrtsoftplus"}, "UNSUPPORTED.*scoring_func"),
        (V3, {"n_group": 7}, "CONFIG.*n_group.*found 7 / allowed a divisor of the 256 experts"),
        (V3, {"n_group": 256}, "CONFIG.*n_group.*leaves a group 2"),
        (V3, {"topk_group": 9}, "CONFIG.*topk_group.*found 9 / allowed 1 to 8"),
        (V3, {"num_experts_per_tok": 129}, "CONFIG.*num_experts_per_tok.*found 129 / allowed 1 to 128"),
        (V3, {"n_shared_experts": 10**9}, "CONFIG.*n_shared_experts.*allowed a whole number, 0 to 8192"),
        (V3, {"first_k_dense_replace": 62}, "CONFIG.*first_k_dense_replace.*0 to 61"),
        (V3, {"num_nextn_predict_layers": -1}, "CONFIG.*num_nextn_predict_layers"),
        (V3, {"rope_interleave": False}, "UNSUPPORTED.*rope_interleave"),
    ],
)  # fmt: skip
def test_one_line_names_the_field_of_other_families(config: dict[str, Any], change: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput, match=line):
        model_from_hf(config | change)


def test_experts_of_deepseek() -> None:
    lite, v3 = model_from_hf(LITE), model_from_hf(V3 | {"n_shared_experts": 2})
    assert lite.moe is not None and v3.moe is not None
    assert (lite.moe.groups, lite.moe.balance, lite.moe.normalize_weights, lite.moe.shared_ffn_size) == (
        1, "loss", False, 2 * 1408,
    )  # fmt: skip
    assert (v3.moe.shared_ffn_size, v3.moe.balance, v3.moe.group_score) == (2 * 2048, "bias", "top2")
    assert (lite.latent.query_rank, v3.latent.query_rank) == (0, 1536)  # type: ignore[union-attr]
    third = model_from_hf(V3 | {"moe_layer_freq": 3, "first_k_dense_replace": 4})
    assert [i for i in range(12) if third.has_experts(i)] == [6, 9]
    assert model_from_hf(V3 | {"n_routed_experts": None}).moe is None
    biased = model_from_hf(V3 | {"attention_bias": True})
    assert (biased.qkv_bias, biased.output_bias) == (True, True)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "scaling", "attention", "softmax"),
    [
        (LLAMA_1B, YARN, 1.138629436, 1.0),
        (LLAMA_1B, YARN | {"attention_factor": 0.7}, 0.7, 1.0),
        (LLAMA_1B, YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, 1.064821, 1.0),
        (V3, V3["rope_scaling"], 1.0, 1.873854207),
        (LITE, LITE["rope_scaling"], 1.0, 1.589626165),
        (V3, V3["rope_scaling"] | {"mscale": 0.5}, 0.865260, 1.873854207),
        (V3, YARN, 1.138629436, 1.0),
    ],
)
def test_what_yarn_does_to_scores(
    config: dict[str, Any], scaling: dict[str, Any], attention: float, softmax: float
) -> None:
    found = model_from_hf(config | {"rope_scaling": scaling}).rope_scaling
    assert found is not None
    assert (found.kind, found.fast_rotations, found.slow_rotations) == ("yarn", 32.0, 1.0)
    assert found.attention_factor == pytest.approx(attention, rel=2e-6)
    assert found.softmax_factor == pytest.approx(softmax, rel=2e-6)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("more", [{}, {"mscale": 0.7, "mscale_all_dim": 1.3}, {"mscale_all_dim": 0.9}, {"factor": 1.0}])
def test_yarn_is_that_of_transformers(family: str, more: dict[str, float]) -> None:
    """What it scales cosines and scores by, in an implementation that is not ours."""
    import transformers  # a second, where every shard collects all tests

    config = (LITE if "deep" in family else LLAMA_1B) | {
        "num_hidden_layers": 1, "vocab_size": 8, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 32, "n_routed_experts": 6, "rope_scaling": YARN | more, "rope_theta": 1e4,
    }  # fmt: skip
    del config["model_type"]
    found = model_from_hf(config | {"model_type": family})
    with torch.device("meta"):
        built = transformers.AutoConfig.for_model(family, **config)
        model = transformers.AutoModelForCausalLM.from_config(built).model
    assert found.rope_scaling is not None
    assert found.rope_scaling.attention_factor == pytest.approx(model.rotary_emb.attention_scaling, rel=1e-12)
    scores = found.rope_scaling.softmax_factor * found.head_size**-0.5
    assert scores == pytest.approx(model.layers[0].self_attn.scaling, rel=1e-12)


def test_scaling_that_a_file_leaves_out() -> None:
    implied = model_from_hf(LLAMA_1B | {"rope_scaling": {k: v for k, v in YARN.items() if k != "factor"}}).rope_scaling
    assert implied is not None and implied.factor == 131072 / 32768
    silent = model_from_hf(LLAMA_1B | {"rope_scaling": {"type": "yarn", "factor": 2.0}}).rope_scaling
    assert silent is not None and silent.original_positions == 131072
    linear = model_from_hf(LLAMA_1B | {"rope_scaling": {"type": "linear", "factor": 3.0}}).rope_scaling
    assert linear is not None and (linear.kind, linear.factor) == ("linear", 3.0)


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


@pytest.mark.alone
def test_files_too_large_to_be_a_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": "' + "x" * 10_000_000 + '"}')
    started = time.process_time()
    with pytest.raises(BadInput, match=r"FILE.*too large"):
        model_from_hf(path)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("name", ["a/" + "x" * 10_000, "\u202eexe", "\ud800", "..", "///", "🦙/🦙", "", "\n\n", 7, {}])
def test_names_become_short_and_printable(name: object) -> None:
    found = model_from_hf(LLAMA_1B | {"_name_or_path": name}).name
    assert found.isprintable() and 0 < len(found) <= 80 and "/" not in found and found != ".."


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from([10**400, 10**5000, -1, 0, 1, 2**24, 2**63, 1e308, "1", "yarn", "llama3", "linear", "noaux_tc"]),
)  # fmt: skip
JUNK = ATOMS | st.lists(ATOMS, max_size=3) | st.dictionaries(st.text(max_size=5), ATOMS | st.lists(ATOMS), max_size=3)


def _spoil(draw: st.DrawFn, table: dict[str, Any]) -> dict[str, Any]:
    """`table` with up to three fields changed or taken away, in a table inside it too."""
    spoiled = dict(table)
    for name in draw(st.lists(st.sampled_from(sorted(spoiled)), min_size=1, max_size=3, unique=True)):
        if draw(st.integers(0, 4)) == 0:
            del spoiled[name]
        elif isinstance(spoiled[name], dict) and draw(st.booleans()):
            spoiled[name] = _spoil(draw, spoiled[name])
        else:
            spoiled[name] = draw(JUNK)
    return spoiled


@st.composite
def spoiled_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A published config, now and then said to be of another family, with fields that are not what they should be."""
    config = draw(st.sampled_from(FAMILIES))
    if draw(st.integers(0, 9)) == 0:
        config = config | {"model_type": draw(st.sampled_from(FAMILIES))["model_type"]}
    return _spoil(draw, config)


@pytest.mark.alone
@settings(max_examples=300)
@given(spoiled_configs())
def test_junk_in_any_field_is_a_legal_model_or_one_line(config: dict[str, Any]) -> None:
    started = time.process_time()
    try:
        case = Case(model=model_from_hf(config), layout=Layout(), sequence_length=1)
        assert not breaches(case)
    except BadInput as error:
        assert error.code in ("CONFIG", "UNSUPPORTED")
        assert "\n" not in str(error)
        assert len(str(error)) < 500
    assert time.process_time() - started < 0.5
