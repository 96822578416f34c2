"""Presets are what was published, and the small ones split every way."""

from dataclasses import replace

import pytest

from penteract.config.layout import CP_METHODS
from penteract.config.model import ModelSpec
from penteract.config.resolve.presets import PRESETS, preset, usual_learning_rate
from penteract.config.resolve.resolved_run import resolve
from penteract.errors import BadInput

FOUR_RANKS = [["dp=4"], ["tp=4"], ["pp=4"], *(["cp=4", f"cp_method={m}"] for m in CP_METHODS)]


def parameters(model: ModelSpec) -> int:
    """Parameters by the shapes of the papers: embedding, attention, MLP or experts with their router, norms, head."""
    d, attention = model.hidden_size, model.heads * model.head_size
    kv = model.kv_heads * model.head_size
    biases = model.qkv_bias * (attention + 2 * kv) + model.output_bias * d
    norms = 2 * d * (2 if model.norm == "layer" else 1) + model.qk_norm * 2 * model.head_size
    matrices = 3 if model.activation == "swiglu" else 2
    total = model.vocab_size * d * (1 if model.tied else 2) + norms // 2 - model.qk_norm * model.head_size
    total += model.max_positions * d if model.positions == "learned" else 0
    for layer in range(model.layers):
        total += d * attention * 2 + d * kv * 2 + biases + norms
        if model.has_experts(layer):
            assert model.moe
            total += model.moe.experts * (matrices * d * model.moe.ffn_size + d)
        else:
            total += matrices * d * model.ffn_size + model.mlp_bias * (model.ffn_size + d)
    return total


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt2", 124_439_808 + (50_304 - 50_257) * 768),
    ],
)
def test_parameters_of_published_models(name: str, published: int) -> None:
    assert parameters(preset(name).model) == published


@pytest.mark.parametrize(
    ("name", "parameters", "rate"),
    [("tiny", 0, 1e-3), ("llama-3.1-405b", 0, 8e-5), ("other", int(1e9), 4e-4), ("other", int(7e9), 3e-4)],
)
def test_a_models_usual_rate_is_that_of_its_shape_whatever_its_name(name: str, parameters: int, rate: float) -> None:
    model = replace(PRESETS["tiny"].model, layers=5) if name == "other" else preset(name).model
    assert usual_learning_rate(replace(model, name="mine"), parameters) == rate


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_alone(name: str) -> None:
    run = resolve(preset=name).run
    assert run.model == PRESETS[name].model
    assert run.layout.world == 1


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-latent"])
@pytest.mark.parametrize("split", FOUR_RANKS, ids=" ".join)
def test_small_presets_split_over_four_ranks_of_any_dimension(name: str, split: list[str]) -> None:
    run = resolve(preset=name, overrides=[f"parallel.{s}" for s in split], world=4).run
    assert run.layout.world == 4
    assert run.layout.global_batch_size == 16


def test_small_experts_split_over_four() -> None:
    assert resolve(preset="tiny-moe", overrides=["parallel.ep=4"]).run.layout.dp == 4
    assert resolve(preset="tiny-moe", overrides=["parallel.ep=4", "parallel.cp=2"]).run.layout.dp == 2
    assert resolve(preset="tiny-moe", overrides=["parallel.tp=4", "parallel.expert_tp=4"]).run.layout.expert_tp == 4


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"PRESET.*found tiny-mo .*use tiny-moe"):
        preset("tiny-mo")
