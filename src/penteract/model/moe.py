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
    matrices = _matrices(do, m, spec, name)
    by = _in_blocks if do.layout.sends_blocks else _gathered if do.layout.gathers_tokens else _exchanged
    out = by(do, spec, (tokens, weights, experts), matrices)
    return do.redistribute(tensor.tp_reduce_scatter, out) if split else out


def _exchanged(do: Do, spec: MoESpec, routed: Values, matrices: Sequence[Param]) -> Value:
    """Each copy of a token goes to its expert, and comes back. `routed`: tokens [s, B, D], weights and experts
    [s, B, k]."""
    tokens, weights, experts = routed
    order, copies = do.op("expert_permutation", experts, experts=spec.experts, ranks=1)
    coming = do.redistribute(expert.counts, copies)
    rows, _, sizes = _rows(do, matrices, copies, coming, by_host=do.mesh.size("ep") > 1)
    h = do.op("permute", tokens, order, top_k=spec.top_k, ranks=1, rows=None)[0]
    h = do.redistribute(expert.dispatch, h, sizes, coming, order)  # [s·B·k, D] -> [R, D]
    y = _experts(do, h, matrices, rows)
    y = do.redistribute(expert.combine, y, sizes, coming, order)
    return do.op("unpermute", y, weights, order, top_k=spec.top_k, ranks=1)[0]


def _in_blocks(do: Do, spec: MoESpec, routed: Values, matrices: Sequence[Param]) -> Value:
    """The same in blocks of a fixed size, [ep·block, D]: the host reads no sizes."""
    tokens, weights, experts = routed
    ranks, block = do.mesh.size("ep"), expert.block_of(do, experts, spec.experts)
    order, copies = do.op("expert_permutation", experts, experts=spec.experts, ranks=1)
    places, copies = do.op("block_places", order, copies, ranks=ranks, block=block)
    coming = do.redistribute(expert.counts, copies)
    rows, offsets, _ = _rows(do, matrices, copies, coming, by_host=False)
    h = do.op("block_permute", tokens, places, top_k=spec.top_k, ranks=ranks, block=block)[0]
    h = do.redistribute(expert.blocks("dispatch", "combine", block), h, coming)
    y = _experts(do, h, matrices, rows, offsets)
    y = do.redistribute(expert.blocks("combine", "dispatch", block), y, coming)
    return do.op("block_unpermute", y, weights, places, top_k=spec.top_k, ranks=ranks, block=block)[0]


def _gathered(do: Do, spec: MoESpec, routed: Values, matrices: Sequence[Param]) -> Value:
    """All ranks get all tokens, copy those of their experts, and add up what these make of a token."""
    tokens, weights, experts = expert.gather_tokens(do, *routed)
    ranks, pads = do.mesh.size("ep"), do.layout.pads_rows
    received = Received(do.layer, at_most=expert.most_rows(do, experts, spec.experts) if pads else 0)
    order, copies = do.op("expert_permutation", experts, experts=spec.experts, ranks=ranks)
    rows, offsets, _ = _rows(do, matrices, copies, copies, by_host=not pads)
    ends = (offsets,) if pads else ()  # behind the last row that came
    h = do.op(_op("permute", pads), tokens, order, *ends, top_k=spec.top_k, ranks=ranks, rows=received)[0]
    y = _experts(do, h, matrices, rows, *ends)
    out = do.op(_op("unpermute", pads), y, weights, order, *ends, top_k=spec.top_k, ranks=ranks)[0]
    return do.redistribute(expert.ep_reduce_scatter, out)


def _rows(
    do: Do, matrices: Sequence[Param], copies: Value, coming: Value, *, by_host: bool
) -> tuple[list[Value], Value, Value]:
    """Rows of each expert: as the product of each of `matrices` takes them, as offsets on the device, and as sizes on
    the host, where a product or (`by_host`) an all-to-all needs these."""
    grouped = [do.layout.experts != "reference" and do.linear_layers.of_experts(w.name) is None for w in matrices]
    offsets = expert.offsets(do, coming) if any(grouped) else coming
    sizes = expert.split_sizes(do, copies, coming) if by_host or not all(grouped) else offsets
    return [offsets if by_offsets else sizes for by_offsets in grouped], offsets, sizes


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
