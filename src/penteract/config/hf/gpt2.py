"""GPT-2: LayerNorm, a learned table of positions, GELU, biases. Dropout is ignored: training has none."""

from __future__ import annotations

from penteract.config.hf.families import name
from penteract.config.hf.fields import Fields
from penteract.config.model import ModelSpec


def gpt2(f: Fields) -> ModelSpec:
    """GPT-2 (Radford 2019). Raises BadInput, UNSUPPORTED, for an option that has no equivalent here, such as
    cross-attention."""
    f.choice("activation_function", "another activation", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    f.choice("scale_attn_weights", "scores that are not scaled", (True,), True)
    f.choice("scale_attn_by_inverse_layer_idx", "scores scaled by depth", (False,), False)
    f.choice("add_cross_attention", "attention to another sequence", (False,), False)
    width, heads = f.get("n_embd", "model.hidden_size"), f.get("n_head", "model.heads")
    if width % heads:
        raise f.wrong("n_head", f"a divisor of n_embd = {width}")
    return ModelSpec(
        name=name(f),
        layers=f.get("n_layer", "model.layers"),
        hidden_size=width,
        heads=heads,
        kv_heads=heads,
        head_size=width // heads,
        ffn_size=f.get("n_inner", "model.ffn_size", 4 * width),
        vocab_size=f.get("vocab_size", "model.vocab_size"),
        activation="gelu",
        norm="layer",
        norm_epsilon=f.get("layer_norm_epsilon", "model.norm_epsilon", 1e-5),
        positions="learned",
        max_positions=f.get("n_positions", "model.max_positions"),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied=f.flag("tie_word_embeddings", True),
        initial_std=f.get("initializer_range", "model.initial_std", 0.02),
    )
