"""A model written as config.json and read again is the same model."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from penteract.config.hf import model_from_hf
from penteract.config.hf.write_config import config_of, different
from penteract.config.model import LatentSpec, ModelSpec, MoESpec, RopeScaling
from penteract.config.resolve.presets import PRESETS
from penteract.errors import BadInput

LLAMA3 = st.builds(
    RopeScaling, factor=st.sampled_from([2.0, 8.0, 32.5]), low_frequency_factor=st.sampled_from([1.0, 2.0]),
    high_frequency_factor=st.sampled_from([4.0, 5.5]), original_positions=st.sampled_from([256, 8192]),
)  # fmt: skip
YARN = st.builds(
    RopeScaling, kind=st.just("yarn"), factor=st.sampled_from([4.0, 40.0]),
    fast_rotations=st.sampled_from([32.0, 16.0]),
    slow_rotations=st.sampled_from([1.0, 2.0]),
    attention_factor=st.sampled_from([1.0, 1.2]),
    original_positions=st.sampled_from([256, 4096]),
)  # fmt: skip
LINEAR = st.builds(RopeScaling, kind=st.just("linear"), factor=st.sampled_from([2.0, 3.5]))


@st.composite
def models(draw: DrawFn, family: str) -> ModelSpec:
    """Any model that the family says."""
    heads, head_size = draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from([4, 6, 16]))
    layers, moe = draw(st.integers(1, 6)), draw(mixtures())
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 4, 8) if heads % n == 0]))
    said: dict[str, Any] = {
        "name": draw(st.sampled_from(["custom", "a-1b", "Big_2"])), "layers": layers, "hidden_size": heads * 8,
        "heads": heads, "kv_heads": kv_heads, "head_size": head_size, "ffn_size": draw(st.sampled_from([24, 64])),
        "vocab_size": draw(st.integers(10, 500)), "norm_epsilon": draw(st.sampled_from([1e-5, 1e-6])),
        "rope_theta": draw(st.sampled_from([1e4, 5e5, 1e6])), "max_positions": draw(st.sampled_from([64, 8192])),
        "initial_std": draw(st.sampled_from([0.02, 0.006])), "tied": draw(st.booleans()),
        "rope_scaling": draw(st.none() | LLAMA3 | YARN | LINEAR),
    }  # fmt: skip
    return ModelSpec(**said | draw(particulars(family, said, moe)))


@st.composite
def mixtures(draw: DrawFn) -> MoESpec:
    return MoESpec(
        experts=draw(st.sampled_from([4, 8])), top_k=draw(st.integers(1, 2)), ffn_size=draw(st.sampled_from([8, 24])),
        balance_coefficient=draw(st.sampled_from([0.001, 0.02])),
    )  # fmt: skip


@st.composite
def particulars(draw: DrawFn, family: str, said: dict[str, Any], moe: MoESpec) -> dict[str, Any]:
    """What the family says beyond the sizes."""
    flag, window = st.booleans(), st.sampled_from([0, 5])
    if family == "llama":
        bias = draw(flag)
        return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": draw(flag)}
    if family == "mistral":
        return {"sliding_window": draw(window)}
    if family == "qwen2":
        return {"qkv_bias": True, "sliding_window": draw(window)}
    if family == "mixtral":
        return {"sliding_window": draw(window), "moe": replace(moe, ffn_size=said["ffn_size"])}
    if family in ("qwen3", "qwen3_moe"):
        bias = draw(flag)
        own = {"qkv_bias": bias, "output_bias": bias, "qk_norm": True, "sliding_window": draw(window)}
        dense = draw(st.sampled_from([(), (0,)]))
        every = replace(moe, every=draw(st.integers(1, 2)), dense_layers=dense, normalize_weights=draw(flag))
        return own | ({"moe": every} if family == "qwen3_moe" else {})
    if family == "gpt2":
        return {
            "activation": "gelu", "norm": "layer", "positions": "learned", "head_size": 8, "kv_heads": said["heads"],
            "qkv_bias": True, "output_bias": True, "mlp_bias": True, "rope_theta": 1e4, "rope_scaling": None,
        }  # fmt: skip
    return draw(latent(family, said, moe))


@st.composite
def latent(draw: DrawFn, family: str, said: dict[str, Any], moe: MoESpec) -> dict[str, Any]:
    groups = draw(st.sampled_from([1, 2]))
    first = draw(st.integers(0, said["layers"]))
    third = family == "deepseek_v3"
    group_score = "top2" if third and groups > 1 else "max"
    routed = replace(
        moe, top_k=1, groups=groups, top_groups=1, group_score=group_score,
        weight_scale=draw(st.sampled_from([1.0, 2.5])),
        shared_ffn_size=moe.ffn_size * draw(st.integers(1, 2)), dense_layers=tuple(range(first)),
        balance="bias" if third else "loss", score="sigmoid" if third else "softmax",
        normalize_weights=third and draw(st.booleans()),
    )  # fmt: skip
    if third:  # says no coefficient
        routed = replace(routed, balance_coefficient=MoESpec(experts=1, top_k=1, ffn_size=1).balance_coefficient)
    scaling = said["rope_scaling"]
    if scaling is not None and scaling.kind == "yarn":
        everywhere = draw(st.sampled_from([0.0, 0.707, 1.0]))
        scaling = replace(scaling, softmax_factor=(0.1 * everywhere * log(scaling.factor) + 1.0) ** 2)
    rank = draw(st.sampled_from([0, 12]))
    return {
        "latent": LatentSpec(kv_rank=8, plain_size=6, rope_size=4, value_size=10, query_rank=rank),
        "moe": draw(st.sampled_from([None, routed])), "head_size": 10, "kv_heads": said["heads"],
        "rope_scaling": scaling, "mtp_layers": draw(st.integers(0, 1)) if third else 0,
    }  # fmt: skip


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt2", "deepseek_v2", "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=30)
@given(data=st.data())
def test_written_and_read_it_is_the_same(family: str, data: st.DataObject) -> None:
    m = data.draw(models(family))
    config = json.loads(json.dumps(config_of(m)))
    assert model_from_hf(config) == m


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_said_but_those_of_no_family(name: str) -> None:
    m = PRESETS[name].model
    if name == "tiny-moe":  # shared experts beside plain attention
        with pytest.raises(BadInput, match=r"UNSUPPORTED.*moe\.shared_ffn_size"):
            config_of(m)
    else:
        assert not different(model_from_hf(config_of(m)), m)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"norm": "layer"}, "model.norm"),
        ({"qkv_bias": True, "mlp_bias": True}, "model.output_bias"),
        ({"positions": "learned"}, "model.positions"),
        ({"activation": "gelu"}, "hidden_act"),
    ],
)
def test_what_no_family_says_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=f"UNSUPPORTED.*nearest: .*{named}"):
        config_of(replace(PRESETS["tiny"].model, **change))


def test_what_training_alone_asks_is_no_difference() -> None:
    m = PRESETS["tiny-moe"].model
    assert m.moe is not None
    other = replace(m, name="b", initial_std=0.5, moe=replace(m.moe, balance="none", balance_coefficient=0.3))
    assert different(m, other) == []
    steered = replace(m, moe=replace(m.moe, balance="bias"))
    assert different(m, steered) == [("model.moe.balance", "loss", "bias")]
    assert different(m, replace(m, moe=None)) == [("model.moe", m.moe, None)]
