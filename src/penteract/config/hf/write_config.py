"""A `ModelSpec` as Hugging Face's config.json: the inverse of `config/hf`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from math import isclose, log, sqrt
from typing import Any

from penteract.config.hf import model_from_hf
from penteract.config.model import ModelSpec
from penteract.errors import BadInput

# Fields of training only: they do not change what weights mean.
_AT_TRAINING = frozenset({
    "model.name", "model.initial_std", "model.mtp_loss_coefficient", "model.z_loss_coefficient",
    "model.moe.balance_coefficient", "model.moe.bias_rate",
})  # fmt: skip


def config_of(m: ModelSpec) -> dict[str, Any]:
    """The config.json that reads back as `m`, of the first family that can express it.

    Raises BadInput, UNSUPPORTED, with the fields that the nearest family cannot say.
    """
    nearest: list[tuple[int, str, list[str]]] = []
    for family, (architecture, write) in WRITERS.items():
        config = {"model_type": family, "architectures": [architecture], "_name_or_path": m.name, **write(m)}
        try:
            lost = different(m, model_from_hf(config))
        except BadInput as error:  # the reader stops at the first field
            nearest.append((2, family, [error.where.removeprefix("config.json: ") or error.found]))
            continue
        if not lost:
            return config
        weight = sum(3 if is_dataclass(a) or is_dataclass(b) else 1 for _, a, b in lost)
        nearest.append((weight, family, [name for name, _, _ in lost]))
    _, family, names = min(nearest, key=lambda row: row[0])
    raise BadInput("UNSUPPORTED", "no Hugging Face family can express this model", where=f"nearest: {family}",
                   found=", ".join(names), fix="train a model that has these as the family does")  # fmt: skip


def different(a: Any, b: Any, prefix: str = "model") -> list[tuple[str, Any, Any]]:
    """(field, its value in a, in b) where two models differ in what their weights mean."""
    found: list[tuple[str, Any, Any]] = []
    for f in fields(a):
        name, mine, other = f"{prefix}.{f.name}", getattr(a, f.name), getattr(b, f.name)
        if is_dataclass(mine) and is_dataclass(other):
            found += different(mine, other, name)
        elif not _same(mine, other) and name not in _AT_TRAINING and not _alike(name, mine, other):
            found.append((name, mine, other))
    return found


def _same(a: object, b: object) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and isclose(a, b, rel_tol=1e-9))


def _alike(name: str, a: object, b: object) -> bool:
    """Balancing by a loss, or not at all, leaves no trace in weights; a balance bias is part of them."""
    return name == "model.moe.balance" and "bias" not in (a, b)


def _sizes(m: ModelSpec) -> dict[str, Any]:
    """The fields of all families but GPT-2."""
    return {
        "hidden_act": "silu" if m.activation == "swiglu" else "gelu",
        "num_hidden_layers": m.layers,
        "hidden_size": m.hidden_size,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_size,
        "intermediate_size": m.ffn_size,
        "vocab_size": m.vocab_size,
        "rms_norm_eps": m.norm_epsilon,
        "max_position_embeddings": m.max_positions,
        "initializer_range": m.initial_std,
        "tie_word_embeddings": m.tied,
        "rope_theta": m.rope_theta,
        **_scaling(m),
    }


def _scaling(m: ModelSpec) -> dict[str, Any]:
    s = m.rope_scaling
    if s is None:
        return {}
    scaling: dict[str, Any] = {"rope_type": s.kind, "type": s.kind, "factor": s.factor}
    if s.kind == "llama3":
        scaling |= {
            "low_freq_factor": s.low_frequency_factor,
            "high_freq_factor": s.high_frequency_factor,
            "original_max_position_embeddings": s.original_positions,
        }
    if s.kind == "yarn":
        scaling |= {
            "beta_fast": s.fast_rotations,
            "beta_slow": s.slow_rotations,
            "attention_factor": s.attention_factor,
            "original_max_position_embeddings": s.original_positions,
        }
        if s.softmax_factor != 1.0 and s.factor > 1:
            scaling["mscale_all_dim"] = _plain((sqrt(s.softmax_factor) - 1) / (0.1 * log(s.factor)))
    return {"rope_scaling": scaling}


def _plain(x: float) -> float:
    """A short decimal number that rounds to the same float, if there is one."""
    return next((short for digits in range(7) if isclose(short := round(x, digits), x, rel_tol=1e-12)), x)


def _llama(m: ModelSpec) -> dict[str, Any]:
    return {**_sizes(m), "attention_bias": m.qkv_bias, "mlp_bias": m.mlp_bias}


def _mistral(m: ModelSpec) -> dict[str, Any]:
    return {**_sizes(m), "sliding_window": m.sliding_window or None}


def _switched_window(m: ModelSpec) -> dict[str, Any]:
    """A window on every layer, or on none."""
    on = m.sliding_window > 0
    return {
        "use_sliding_window": on,
        "sliding_window": m.sliding_window or None,
        "max_window_layers": 0 if on else m.layers,
    }


def _qwen2(m: ModelSpec) -> dict[str, Any]:
    return {**_sizes(m), **_switched_window(m)}


def _qwen3(m: ModelSpec) -> dict[str, Any]:
    return {**_qwen2(m), "attention_bias": m.qkv_bias}


def _mixtral(m: ModelSpec) -> dict[str, Any]:
    if m.moe is None:
        return _mistral(m)
    return {
        **_mistral(m),
        "intermediate_size": m.moe.ffn_size,
        "num_local_experts": m.moe.experts,
        "num_experts_per_tok": m.moe.top_k,
        "router_aux_loss_coef": m.moe.balance_coefficient,
    }


def _qwen3_moe(m: ModelSpec) -> dict[str, Any]:
    if m.moe is None:
        return _qwen3(m)
    return {
        **_qwen3(m),
        "num_experts": m.moe.experts,
        "num_experts_per_tok": m.moe.top_k,
        "moe_intermediate_size": m.moe.ffn_size,
        "decoder_sparse_step": m.moe.every,
        "mlp_only_layers": list(m.moe.dense_layers),
        "norm_topk_prob": m.moe.normalize_weights,
        "router_aux_loss_coef": m.moe.balance_coefficient,
    }


def _latent(m: ModelSpec) -> dict[str, Any]:
    if m.latent is None:
        return {}
    return {
        "kv_lora_rank": m.latent.kv_rank,
        "q_lora_rank": m.latent.query_rank or None,
        "qk_nope_head_dim": m.latent.plain_size,
        "qk_rope_head_dim": m.latent.rope_size,
        "v_head_dim": m.latent.value_size,
    }


def _deepseek_v2(m: ModelSpec) -> dict[str, Any]:
    """Experts with softmax scores, and weights that are not normalised."""
    sizes = {name: value for name, value in _sizes(m).items() if name != "head_dim"}
    return {**sizes, **_latent(m), "mlp_bias": m.mlp_bias, **_routed(m)}


def _deepseek_v3(m: ModelSpec) -> dict[str, Any]:
    """Experts with sigmoid scores, chosen with a bias; multi-token prediction is possible."""
    found = _deepseek_v2(m) | {"num_nextn_predict_layers": m.mtp_layers}
    if m.moe is not None:
        found |= {"topk_method": "noaux_tc", "norm_topk_prob": m.moe.normalize_weights}
    del found["mlp_bias"]
    return found


def _routed(m: ModelSpec) -> dict[str, Any]:
    moe = m.moe
    if moe is None:
        return {}
    routed = [i for i in range(m.layers) if m.has_experts(i)]
    return {
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_size,
        "n_shared_experts": moe.shared_ffn_size // moe.ffn_size,
        "first_k_dense_replace": routed[0] if routed else m.layers,
        "moe_layer_freq": routed[1] - routed[0] if len(routed) > 1 else 1,
        "routed_scaling_factor": moe.weight_scale,
        "topk_method": "greedy" if moe.groups == 1 else "group_limited_greedy",
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
        "aux_loss_alpha": moe.balance_coefficient,
    }


def _gpt2(m: ModelSpec) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "n_layer": m.layers,
        "n_embd": m.hidden_size,
        "n_head": m.heads,
        "n_inner": m.ffn_size,
        "n_positions": m.max_positions,
        "vocab_size": m.vocab_size,
        "layer_norm_epsilon": m.norm_epsilon,
        "initializer_range": m.initial_std,
        "tie_word_embeddings": m.tied,
    }


WRITERS: Mapping[str, tuple[str, Callable[[ModelSpec], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mistral": ("MistralForCausalLM", _mistral),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _deepseek_v2),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _deepseek_v3),
    "gpt2": ("GPT2LMHeadModel", _gpt2),
}
