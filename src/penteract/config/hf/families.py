"""Llama and similar families: RMSNorm, rotary positions, SwiGLU; dense, or with experts."""

from __future__ import annotations

from typing import Any, cast

from penteract.config.hf.fields import Fields
from penteract.config.hf.rope import rope
from penteract.config.model import ModelSpec, MoESpec
from penteract.errors import BadInput


def sizes(f: Fields, *, head_size: int | None = None, theta: float = 10_000.0) -> dict[str, Any]:
    """The fields that all of these families have. `head_size`: the default; None: the hidden size over heads."""
    return {**kernel(f), **heads(f, head_size), **rope(f, theta=theta)}


def kernel(f: Fields) -> dict[str, Any]:
    """All fields but those of heads and positions."""
    f.choice("hidden_act", "another activation", ("silu", "swish"), "silu")
    return {
        "name": name(f),
        "layers": f.get("num_hidden_layers", "model.layers"),
        "hidden_size": f.get("hidden_size", "model.hidden_size"),
        "ffn_size": f.get("intermediate_size", "model.ffn_size"),
        "vocab_size": f.get("vocab_size", "model.vocab_size"),
        "norm_epsilon": f.get("rms_norm_eps", "model.norm_epsilon", 1e-6),
        "max_positions": f.get("max_position_embeddings", "model.max_positions"),
        "initial_std": f.get("initializer_range", "model.initial_std", 0.02),
        "tied": f.flag("tie_word_embeddings"),
    }


def name(f: Fields) -> str:
    """The model's name in the file, without its owner; else its family."""
    given = f.config.get("_name_or_path")
    short = given[-200:].rstrip("/").rsplit("/", 1)[-1][:80] if isinstance(given, str) else ""
    return short if short.isprintable() and any(c.isalnum() for c in short) else str(f.config["model_type"])


def heads(f: Fields, head_size: int | None) -> dict[str, Any]:
    """The counts of heads and of KV heads, and the head size. Raises BadInput, CONFIG, if they do not divide, or if
    the head size is odd."""
    count, hidden = f.get("num_attention_heads", "model.heads"), f.get("hidden_size", "model.hidden_size")
    if head_size is None and "head_dim" not in f and hidden % count:
        raise BadInput(
            "CONFIG", "hidden_size does not divide into heads", where=f.where, found=f"{hidden} / {count}",
            fix="add head_dim",
        )  # fmt: skip
    size = f.get("head_dim", "model.head_size", head_size or hidden // count)
    if size % 2:
        raise f.wrong("head_dim", "an even number, as rotary positions turn pairs", found=str(size))
    shared = {"default": count} if f.config["model_type"] == "llama" else {}
    kv = f.get("num_key_value_heads", "model.kv_heads", **shared)
    if count % kv:
        raise f.wrong("num_key_value_heads", f"a divisor of the {count} heads")
    return {"heads": count, "kv_heads": kv, "head_size": size}


def _window(f: Fields) -> int:
    return f.get("sliding_window", "model.sliding_window", 0)


def _switched_window(f: Fields, layers: int) -> int:
    """Qwen's window has a switch, and applies from layer `max_window_layers` on: to all or none; a mix is not
    supported.
    """
    kinds = f.config.get("layer_types")
    if kinds is not None:
        return _listed_window(f, kinds)
    if not f.flag("use_sliding_window"):
        return 0
    first = f.get("max_window_layers", "model.sliding_window", layers)
    if first >= layers:
        return 0
    if first:
        raise f.unsupported("max_window_layers", "a window on some layers only", f"0, or {layers} and more")
    return _window(f)


def _listed_window(f: Fields, kinds: object) -> int:
    """Newer files list each layer's kind."""
    found = cast("list[object]", kinds if isinstance(kinds, list) else [kinds])
    if all(kind == "full_attention" for kind in found):
        return 0
    if all(kind == "sliding_attention" for kind in found):
        return _window(f) if f.flag("use_sliding_window") else 0
    raise f.unsupported(
        "layer_types", "layers that attend in different ways", "all full_attention, or all sliding_attention"
    )


def llama(f: Fields) -> ModelSpec:
    """Llama: biases of the attention projections and of the MLP only if the file has them."""
    bias = f.flag("attention_bias")
    return ModelSpec(**sizes(f), qkv_bias=bias, output_bias=bias, mlp_bias=f.flag("mlp_bias"))


def mistral(f: Fields) -> ModelSpec:
    """Mistral: no biases; a sliding window if the file has one."""
    return ModelSpec(**sizes(f), sliding_window=_window(f))


def qwen2(f: Fields) -> ModelSpec:
    """Qwen2: biases on queries, keys and values; a sliding window if its switch is on."""
    found = sizes(f)
    return ModelSpec(**found, qkv_bias=True, sliding_window=_switched_window(f, found["layers"]))


def qwen3(f: Fields, moe: MoESpec | None = None, *, head_size: int | None = 128) -> ModelSpec:
    """Qwen3: normalised queries and keys. `head_size`: the default; None: the hidden size over heads."""
    found, bias = sizes(f, head_size=head_size), f.flag("attention_bias")
    window = _switched_window(f, found["layers"])
    return ModelSpec(**found, qkv_bias=bias, output_bias=bias, qk_norm=True, moe=moe, sliding_window=window)


def mixtral(f: Fields) -> ModelSpec:
    """Mixtral: every MLP is experts of the file's `intermediate_size`; rotary theta is 1e6 by default."""
    found = sizes(f, theta=1e6)
    moe = MoESpec(
        experts=f.get("num_local_experts", "model.moe.experts"),
        top_k=top_k(f, "num_local_experts"),
        ffn_size=found["ffn_size"],
        **_balance(f),
    )
    return ModelSpec(**found, sliding_window=_window(f), moe=moe)


def qwen3_moe(f: Fields) -> ModelSpec:
    """Qwen3 with experts in every `decoder_sparse_step`-th layer, except those that `mlp_only_layers` names."""
    experts = "num_local_experts" if "num_local_experts" in f else "num_experts"  # the newer name, the older one
    moe = MoESpec(
        experts=f.get(experts, "model.moe.experts"),
        top_k=top_k(f, experts),
        ffn_size=f.get("moe_intermediate_size", "model.moe.ffn_size"),
        every=f.get("decoder_sparse_step", "model.moe.every", 1),
        dense_layers=f.get("mlp_only_layers", "model.moe.dense_layers", ()),
        normalize_weights=f.flag("norm_topk_prob"),
        **_balance(f),
    )
    return qwen3(f, moe, head_size=None)


def top_k(f: Fields, experts: str) -> int:
    """How many experts a token visits. `experts`: the field with their number."""
    chosen, most = f.get("num_experts_per_tok", "model.moe.top_k"), f.get(experts, "model.moe.experts")
    if chosen > most:
        raise f.wrong("num_experts_per_tok", f"1 to {most}")
    return chosen


def _balance(f: Fields) -> dict[str, Any]:
    return {"balance_coefficient": f.get("router_aux_loss_coef", "model.moe.balance_coefficient", 0.001)}
