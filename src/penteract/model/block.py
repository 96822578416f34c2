"""One transformer layer."""

from __future__ import annotations

from penteract.config.model import ModelSpec
from penteract.model.attention import attention
from penteract.model.latent_attention import latent_attention
from penteract.model.mlp import mlp
from penteract.model.moe import moe
from penteract.model.norm import norm
from penteract.ops.do import Do, Value


def block(do: Do, m: ModelSpec, layer: int, x: Value, sequence_length: int) -> Value:
    """One pre-norm layer; MTP layers, after the last, are built like the last.   x [S@cp·tp, B, D] -> same"""
    name = f"layers.{layer}"
    x, h = do.fork(x)
    x = do.add(x, _attention(do, m, f"{name}.attention", norm(do, m, f"{name}.norm1", h), sequence_length))
    x, h = do.fork(x)
    h = norm(do, m, f"{name}.norm2", h)
    if m.moe is not None and m.has_experts(min(layer, m.layers - 1)):
        return do.add(x, moe(do, m, m.moe, f"{name}.moe", h, sequence_length))
    return do.add(x, mlp(do, m, f"{name}.mlp", h, m.ffn_size))


def _attention(do: Do, m: ModelSpec, name: str, x: Value, sequence_length: int) -> Value:
    if m.latent is not None:
        return latent_attention(do, m, m.latent, name, x, sequence_length)
    return attention(do, m, name, x, sequence_length)
