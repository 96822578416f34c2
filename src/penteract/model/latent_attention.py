"""Multi-head latent attention: keys and values are computed from one small latent per token.

DeepSeek-V2 2024 (2405.04434) §2.1, eq. 9-19. Latents are projected, normalised and rotated while tokens are sharded
over tp: each token is projected down once, and tp gathers only latents.
"""

from __future__ import annotations

from penteract.config.model import LatentSpec, ModelSpec
from penteract.model.attention import score_scale
from penteract.ops.do import Do, Value
from penteract.ops.params import Param, Shard
from penteract.parallel import context, tensor


def latent_attention(do: Do, m: ModelSpec, latent: LatentSpec, name: str, x: Value, sequence_length: int) -> Value:
    """x [S@cp·tp, B, D] -> same.   Heads are sharded over tp; all heads share the latents and the rotated key."""
    to_queries, to_latent = do.fork(x)
    q = _queries(do, m, latent, name, to_queries)  # [S@cp, B, H@tp·C]
    own = (sequence_length // do.layout.cp, do.layout.micro_batch_size)
    if m.positions == "rope":
        q = do.rope(q, do.input("positions", own), head_size=m.head_size, plain_size=latent.plain_size,
                    theta=m.rope_theta, scaling=m.rope_scaling)  # fmt: skip

    rows = latent.kv_rank + latent.rope_size
    down = do.linear(to_latent, *_down(m, f"{name}.kv_down", rows))
    c, key = do.op("split", down, first=latent.kv_rank)  # [S@cp·tp, B, kv_rank], [S@cp·tp, B, rope_size]
    c = do.rms_norm(c, _norm(f"{name}.kv_norm", latent.kv_rank), m.norm_epsilon)
    if m.positions == "rope":
        where = do.input("positions:tp", (own[0] // do.layout.tp, own[1]))
        key = do.rope(key, where, head_size=latent.rope_size, theta=m.rope_theta, scaling=m.rope_scaling)

    c, key = context.sources(do, do.redistribute(tensor.tp_all_gather, c), do.redistribute(tensor.tp_all_gather, key))
    unfolded = do.linear(c, _up(m, f"{name}.kv_up", latent.plain_size + latent.value_size, latent.kv_rank))
    k, v = do.op("unfold_heads", unfolded, key, plain_size=latent.plain_size, value_size=latent.value_size)
    o = context.attend(do, q, k, v, sequence_length, head_size=m.head_size, value_size=latent.value_size,
                       scale=score_scale(m), window=m.sliding_window)  # fmt: skip
    width = m.heads * latent.value_size
    out = Param(f"{name}.o.weight", (m.hidden_size, width), (Shard(1, "tp"),), scale=m.residual_std, matrix=True)
    y = do.redistribute(tensor.tp_reduce_scatter, do.linear(o, out))
    return do.add_bias(y, Param(f"{name}.o.bias", (m.hidden_size,), decay=False)) if m.output_bias else y


def _queries(do: Do, m: ModelSpec, latent: LatentSpec, name: str, x: Value) -> Value:
    """[S@cp·tp, B, D] -> [S@cp, B, H@tp·C], through the queries' own latent if there is one."""
    if not latent.query_rank:
        return do.linear(do.redistribute(tensor.tp_all_gather, x), _up(m, f"{name}.q", m.head_size, m.hidden_size))
    c = do.linear(x, *_down(m, f"{name}.q_down", latent.query_rank))
    c = do.rms_norm(c, _norm(f"{name}.q_norm", latent.query_rank), m.norm_epsilon)
    return do.linear(do.redistribute(tensor.tp_all_gather, c), _up(m, f"{name}.q_up", m.head_size, latent.query_rank))


def _down(m: ModelSpec, name: str, rank: int) -> tuple[Param, ...]:
    """Projection to a latent, replicated on all tensor ranks."""
    w = Param(f"{name}.weight", (rank, m.hidden_size), scale=m.initial_std, matrix=True)
    return (w, Param(f"{name}.bias", (rank,), decay=False)) if m.qkv_bias else (w,)


def _norm(name: str, rank: int) -> Param:
    return Param(f"{name}.weight", (rank,), fill=1.0, decay=False)


def _up(m: ModelSpec, name: str, size: int, rank: int) -> Param:
    """Projection from `rank` features to `size` features of each head."""
    shard = (Shard(0, "tp", m.heads),)
    return Param(f"{name}.weight", (m.heads * size, rank), shard, scale=m.initial_std, matrix=True)
