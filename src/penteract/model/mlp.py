"""The dense feed-forward part of a layer: SwiGLU (gate, up, down) or GELU (up, down)."""

from __future__ import annotations

from penteract.config.model import ModelSpec
from penteract.ops.do import Do, Value
from penteract.ops.params import Param, Shard
from penteract.parallel import tensor


def mlp(do: Do, m: ModelSpec, name: str, x: Value, ffn_size: int) -> Value:
    """x [S@cp·tp, B, D] -> same.   Columns F are sharded over tp."""
    h = do.redistribute(tensor.tp_all_gather, x)  # [S@cp, B, D]
    if m.activation == "swiglu":
        hg, hu = do.fork(h)
        h = do.swiglu(
            do.linear(hg, *_columns(m, name, "gate", ffn_size)), do.linear(hu, *_columns(m, name, "up", ffn_size))
        )
    else:
        h = do.gelu(do.linear(h, *_columns(m, name, "up", ffn_size)))
    down = Param(f"{name}.down.weight", (m.hidden_size, ffn_size), (Shard(1, "tp"),), scale=m.residual_std, matrix=True)
    y = do.redistribute(tensor.tp_reduce_scatter, do.linear(h, down))
    return do.add_bias(y, Param(f"{name}.down.bias", (m.hidden_size,), decay=False)) if m.mlp_bias else y


def _columns(m: ModelSpec, name: str, which: str, ffn_size: int) -> tuple[Param, ...]:
    shard = (Shard(0, "tp"),)
    w = Param(f"{name}.{which}.weight", (ffn_size, m.hidden_size), shard, scale=m.initial_std, matrix=True)
    return (w, Param(f"{name}.{which}.bias", (ffn_size,), shard, decay=False)) if m.mlp_bias else (w,)
