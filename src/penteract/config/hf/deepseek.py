"""DeepSeek-V2 and -V3: latent attention, grouped routing, shared experts, multi-token prediction."""

from __future__ import annotations

from typing import Any

from penteract.config.hf.families import kernel, top_k
from penteract.config.hf.fields import Fields
from penteract.config.hf.rope import rope
from penteract.config.model import LatentSpec, ModelSpec, MoESpec

_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
_ROWS = 2**24  # most of any width


def deepseek_v2(f: Fields) -> ModelSpec:
    """Latent attention (2405.04434 §2.1); by default experts are scored by softmax and chosen greedily."""
    return ModelSpec(**_sizes(f), mlp_bias=f.flag("mlp_bias"), moe=_moe(f, method="greedy", score="softmax"))


def deepseek_v3(f: Fields) -> ModelSpec:
    """Latent attention, sigmoid scores with a balance bias (2412.19437 §2.1.2), and multi-token prediction (§2.2)."""
    # In its files the two rows of a rotated pair are adjacent.
    f.choice("rope_interleave", "rotated rows in another order", (True,), True)
    ahead = f.get("num_nextn_predict_layers", "model.mtp_layers", 0)
    moe = _moe(f, method="noaux_tc", score="sigmoid", normalize=True)
    return ModelSpec(**_sizes(f), moe=moe, mtp_layers=ahead)


def _sizes(f: Fields) -> dict[str, Any]:
    heads, latent, bias = f.get("num_attention_heads", "model.heads"), _latent(f), f.flag("attention_bias")
    if f.get("num_key_value_heads", "model.kv_heads", heads) != heads:
        raise f.wrong("num_key_value_heads", f"{heads}, as keys and values unfold for every head")
    return {
        **kernel(f),
        "heads": heads,
        "kv_heads": heads,
        "head_size": latent.plain_size + latent.rope_size,
        "qkv_bias": bias,  # of the projections down
        "output_bias": bias,
        "latent": latent,
        **rope(f, scales_scores=True),
    }


def _latent(f: Fields) -> LatentSpec:
    part = "model.latent"
    rotated = f.get("qk_rope_head_dim", f"{part}.rope_size")
    if rotated % 2:
        raise f.wrong("qk_rope_head_dim", "an even number, as rotary positions turn pairs")
    return LatentSpec(
        kv_rank=f.get("kv_lora_rank", f"{part}.kv_rank"),
        plain_size=f.get("qk_nope_head_dim", f"{part}.plain_size"),
        rope_size=rotated,
        value_size=f.get("v_head_dim", f"{part}.value_size"),
        query_rank=f.get("q_lora_rank", f"{part}.query_rank", 0),
    )


def _moe(f: Fields, *, method: str, score: str, normalize: bool = False) -> MoESpec | None:
    """The experts; None if there are none. `method`, `score`, `normalize`: defaults for absent fields.

    "noaux_tc" balances by a bias. The small additional balance loss of V3 is not supported.
    """
    if "n_routed_experts" not in f:
        return None
    part, layers = "model.moe", f.get("num_hidden_layers", "model.layers")
    method = f.choice("topk_method", "another way to choose experts", _METHODS, method)
    size = f.get("moe_intermediate_size", f"{part}.ffn_size")
    first = f.integer("first_k_dense_replace", 0, layers, 0)
    every = f.integer("moe_layer_freq", 1, layers, 1)
    balance: dict[str, Any] = {"balance": "bias"}
    if method != "noaux_tc":
        balance = {"balance_coefficient": f.get("aux_loss_alpha", f"{part}.balance_coefficient", 0.001)}
    return MoESpec(
        experts=f.get("n_routed_experts", f"{part}.experts"),
        top_k=top_k(f, "n_routed_experts"),
        ffn_size=size,
        shared_ffn_size=size * f.integer("n_shared_experts", 0, _ROWS // size, 0),
        dense_layers=tuple(i for i in range(layers) if i < first or i % every),
        score=f.choice("scoring_func", "another score of experts", ("softmax", "sigmoid"), score),
        normalize_weights=f.flag("norm_topk_prob", normalize),
        weight_scale=f.get("routed_scaling_factor", f"{part}.weight_scale", 1.0),
        **balance,
        **_groups(f, method),
    )


def _groups(f: Fields, method: str) -> dict[str, Any]:
    """The groups that limit a token's choice; V2 scores a group by its best expert, V3 by its best two."""
    experts, chosen = f.get("n_routed_experts", "model.moe.experts"), top_k(f, "n_routed_experts")
    groups = 1 if method == "greedy" else f.get("n_group", "model.moe.groups", 1)
    if groups == 1:
        return {}
    best = 2 if method == "noaux_tc" else 1
    if experts % groups or experts // groups < best:
        raise f.wrong("n_group", f"a divisor of the {experts} experts, that leaves a group {best} or more")
    top = f.get("topk_group", "model.moe.top_groups", 1)
    if top > groups:
        raise f.wrong("topk_group", f"1 to {groups}")
    if chosen > top * experts // groups:
        raise f.wrong("num_experts_per_tok", f"1 to {top * experts // groups}, the experts of {top} groups")
    return {"groups": groups, "top_groups": top, "group_score": "top2" if best == 2 else "max"}
