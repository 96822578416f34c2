"""The mixture of experts: route tokens, send them to their experts, combine the results. No token is dropped."""

from __future__ import annotations

from collections.abc import Sequence

from penteract.config.model import ModelSpec, MoESpec
from penteract.model.mlp import mlp
from penteract.ops.do import Do, Value, Values, single_collective
from penteract.ops.params import Param, Shard
from penteract.ops.spec import Received
from penteract.parallel import expert, tensor

# Choices summed over all ranks that share a sequence; no gradient flows through a count.
over_sequence = single_collective("choices", "sequence", "all_reduce")

# If experts are sharded over tp, expert indices are gathered with the tokens. The name is the same, so that a layout
# recomputes both or none.
_indices = single_collective("tp_all_gather", "tp", "all_gather")


def moe(do: Do, m: ModelSpec, spec: MoESpec, name: str, x: Value, sequence_length: int) -> Value:
    """x [S@cp·tp, B, D] -> same.   Experts are sharded over ep, their columns over expert_tp."""
    if not spec.shared_ffn_size:
        return _routed(do, m, spec, name, do.fork(x), sequence_length)
    if do.layout.gathers_tokens:  # beside the shared experts; their gradients' sum is the last thing in backward
        to_router, shared, tokens = do.fork(x, 3)
        other = mlp(do, m, f"{name}.shared", shared, spec.shared_ffn_size)
        return do.add(_routed(do, m, spec, name, (to_router, tokens), sequence_length), other)
    routed, shared = do.fork(x)
    y = _routed(do, m, spec, name, do.fork(routed), sequence_length)
    return do.add(y, mlp(do, m, f"{name}.shared", shared, spec.shared_ffn_size))


def _route(do: Do, m: ModelSpec, spec: MoESpec, name: str, x: Value, sequence_length: int) -> tuple[Value, Value]:
    """x [s, B, D] -> weights and experts of each token, [s, B, k]; choices are balanced."""
    table = Param(f"{name}.router.weight", (spec.experts, m.hidden_size), scale=m.initial_std)
    weights, experts, scores, choices = do.op(
        "router", x, params=(table,),
        top_k=spec.top_k, experts=spec.experts, score=spec.score, normalize=spec.normalize_weights,
        balance=spec.balance, bias=f"{name}.balance" if spec.balance == "bias" else "", scale=spec.weight_scale,
        groups=spec.groups, top_groups=spec.top_groups, group_score=spec.group_score,
    )  # fmt: skip
    if spec.balance == "loss":
        share = do.op("balance_loss", scores, do.redistribute(over_sequence, choices), sequence_length=sequence_length,
                      top_k=spec.top_k, experts=spec.experts, score=spec.score)[0]  # fmt: skip
        do.loss(share, "balance")
    elif spec.balance == "bias":
        do.op("tokens_per_expert", choices, name=f"{name}.balance")
    return weights, experts


def _routed(do: Do, m: ModelSpec, spec: MoESpec, name: str, x: Values, sequence_length: int) -> Value:
    """x [s, B, D], for the router and for experts -> same"""
    to_router, tokens = x
    weights, experts = _route(do, m, spec, name, to_router, sequence_length)
    split = do.layout.expert_tp > 1
    if split:
        tokens, weights, experts = (
            do.redistribute(tensor.tp_all_gather, tokens),
            do.redistribute(tensor.tp_all_gather, weights),
            do.redistribute(_indices, experts),
        )
    gathers = do.layout.gathers_tokens
    ranks, received = (do.mesh.size("ep"), Received(do.layer)) if gathers else (1, None)
    if gathers:
        tokens, weights, experts = expert.gather_tokens(do, tokens, weights, experts)
    pads = do.layout.pads_rows
    if pads:
        received = Received(do.layer, at_most=expert.most_rows(do, experts, spec.experts))
    order, copies = do.op("expert_permutation", experts, experts=spec.experts, ranks=ranks)
    coming = copies if gathers else do.redistribute(expert.counts, copies)
    matrices = _matrices(do, m, spec, name)
    grouped = [do.layout.experts != "reference" and do.linear_layers.of_experts(w.name) is None for w in matrices]
    offsets = expert.offsets(do, coming) if any(grouped) else coming
    # Host sizes are needed for an all-to-all, and for one product per expert.
    by_host = (do.mesh.size("ep") > 1 and not pads) or not all(grouped)
    sizes = expert.split_sizes(do, copies, coming) if by_host else offsets
    ends = (offsets,) if pads else ()  # behind the last row that came
    h = do.op(_op("permute", pads), tokens, order, *ends, top_k=spec.top_k, ranks=ranks, rows=received)[0]
    if not gathers:
        h = do.redistribute(expert.dispatch, h, sizes, coming, order)  # [s·B·k, D] -> [R, D]
    y = _experts(do, h, matrices, [offsets if by_offsets else sizes for by_offsets in grouped], *ends)
    if not gathers:
        y = do.redistribute(expert.combine, y, sizes, coming, order)
    out = do.op(_op("unpermute", pads), y, weights, order, *ends, top_k=spec.top_k, ranks=ranks)[0]
    out = do.redistribute(expert.ep_reduce_scatter, out) if gathers else out
    return do.redistribute(tensor.tp_reduce_scatter, out) if split else out


def _matrices(do: Do, m: ModelSpec, spec: MoESpec, name: str) -> tuple[Param, Param, Param]:
    """Gate, up and down of every expert."""
    x, d, f, cut = spec.experts, m.hidden_size, spec.ffn_size, do.layout.expert_tp
    columns = (Shard(0, "ep"), Shard(1, "tp", cut))
    gate = Param(f"{name}.experts.gate", (x, f, d), columns, scale=m.initial_std, matrix=True)
    up = Param(f"{name}.experts.up", (x, f, d), columns, scale=m.initial_std, matrix=True)
    rows = (Shard(0, "ep"), Shard(2, "tp", cut))
    down = Param(f"{name}.experts.down", (x, d, f), rows, scale=m.residual_std, matrix=True)
    return gate, up, down


def _op(name: str, pads: bool) -> str:
    """The op, or that on registers with room for more rows than came."""
    return f"padded_{name}" if pads else name


def _experts(do: Do, h: Value, matrices: Sequence[Param], rows: Sequence[Value], ends: Value | None = None) -> Value:
    """Every expert's SwiGLU on its rows; `rows`: as `expert_linear` takes them; `ends`: offsets of padded rows.
    h [R, D] -> same"""
    gate, up, down = matrices
    hg, hu = do.fork(h)
    inner = do.swiglu(do.expert_linear(hg, rows[0], gate), do.expert_linear(hu, rows[1], up), ends)
    return do.expert_linear(inner, rows[2], down)
