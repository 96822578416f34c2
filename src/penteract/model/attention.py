"""Self-attention with grouped KV heads, rotary or learned positions, document boundaries."""

from __future__ import annotations

from penteract.config.model import ModelSpec
from penteract.ops.do import Do, Value
from penteract.ops.params import Param, Shard
from penteract.parallel import context, tensor


def attention(do: Do, m: ModelSpec, name: str, x: Value, sequence_length: int) -> Value:
    """x [S@cp·tp, B, D] -> same.   Heads are sharded over tp; if tp exceeds the KV heads, neighbouring ranks share
    one."""
    h = do.redistribute(tensor.tp_all_gather, x)  # [S@cp, B, D]
    hq, hk, hv = do.fork(h, 3)
    q = do.linear(hq, *_projection(m, name, "q", m.heads))  # [S@cp, B, H@tp·C]
    k = do.linear(hk, *_projection(m, name, "k", m.kv_heads))
    v = do.linear(hv, *_projection(m, name, "v", m.kv_heads))
    if m.qk_norm:
        q = do.rms_norm(q, Param(f"{name}.q_norm.weight", (m.head_size,), fill=1.0, decay=False), m.norm_epsilon)
        k = do.rms_norm(k, Param(f"{name}.k_norm.weight", (m.head_size,), fill=1.0, decay=False), m.norm_epsilon)
    if m.positions == "rope":
        own = sequence_length // do.layout.cp
        positions = do.input("positions", (own, do.layout.micro_batch_size))
        q = do.rope(q, positions, head_size=m.head_size, theta=m.rope_theta, scaling=m.rope_scaling)
        k = do.rope(k, positions, head_size=m.head_size, theta=m.rope_theta, scaling=m.rope_scaling)
    o = context.attend(do, q, k, v, sequence_length, head_size=m.head_size, value_size=m.head_size,
                       scale=score_scale(m), window=m.sliding_window)  # fmt: skip
    width = m.heads * m.head_size
    out = Param(f"{name}.o.weight", (m.hidden_size, width), (Shard(1, "tp"),), scale=m.residual_std, matrix=True)
    y = do.redistribute(tensor.tp_reduce_scatter, do.linear(o, out))  # [S@cp·tp, B, D]
    return do.add_bias(y, Param(f"{name}.o.bias", (m.hidden_size,), decay=False)) if m.output_bias else y


def score_scale(m: ModelSpec) -> float:
    """The scale of scores: C^(-1/2), times YaRN's factor if there is one."""
    return m.head_size**-0.5 * (m.rope_scaling.softmax_factor if m.rope_scaling else 1.0)


def _projection(m: ModelSpec, name: str, which: str, heads: int) -> tuple[Param, ...]:
    rows = heads * m.head_size
    shard = (Shard(0, "tp", heads),)
    w = Param(f"{name}.{which}.weight", (rows, m.hidden_size), shard, scale=m.initial_std, matrix=True)
    return (w, Param(f"{name}.{which}.bias", (rows,), shard, decay=False)) if m.qkv_bias else (w,)
