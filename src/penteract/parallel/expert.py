"""Expert parallelism.

Split      experts, over ranks of dp·cp, which hold different tokens.
Traffic    by `ep_method`. "all_to_all":
           counts   forward all-to-all of the number of copies for each expert (no gradient)
           dispatch forward all-to-all of token copies to their experts   backward all-to-all of their gradients back
           combine  forward all-to-all of results back to their tokens    backward all-to-all of their gradients again
           "all_gather":
           ep_all_gather       forward all-gather tokens        backward reduce-scatter their gradients
           ep_reduce_scatter   forward reduce-scatter what each rank's experts add to them
                               backward all-gather the gradients of the sums
Costs      the residual stream both ways: top_k·(ep - 1)/ep times by all-to-all, as a token has that many copies on
           other ranks; ep - 1 times by all-gather, as each token goes to each rank once. No token is dropped.
Sizes      how many copies come, routing decides, and the host reads it for each layer; or, with `expert_rows`
           "padded", kernels find it on the device, and the host waits for nothing. "all_gather": registers have room
           for the most that can come of each gathered token. "all_to_all": each rank sends each a block of a fixed
           size, `capacity_percent` of what even routing sends. If copies do not fit, the step changes nothing, and
           is repeated with exact sizes: no token is dropped.
Rounding   "all_gather": what a rank's experts add to a token is rounded to the compute dtype before ranks' shares are
           summed, and so are gradients of tokens; by all-to-all one sum has all copies.
Helps      when experts are many and large; hurts when routing is uneven: all wait for the rank with the most tokens.
           All-gather suits few ranks and many choices. It has equal shares, and copies are made where they are used.
Papers     Lepikhin 2020 (2006.16668); DeepSeek-V3 2024 (2412.19437) §2.1.2
"""

from __future__ import annotations

from math import prod
from typing import Any

from penteract.ops.do import Do, Redistribution, Steps, Value, Values, single_collective
from penteract.ops.spec import Dim, Received, size

# [s, ..] -> [ep·s, ..], and partial sums [ep·s, ..] -> their sum [s, ..]
ep_all_gather = single_collective("ep_all_gather", "ep", "all_gather", "reduce_scatter", overlaps=True)
ep_reduce_scatter = single_collective("ep_reduce_scatter", "ep", "reduce_scatter", "all_gather", overlaps=True)
# Indices of experts have no gradient. The name is the same, so that a layout recomputes both or none.
_indices = single_collective("ep_all_gather", "ep", "all_gather", overlaps=True)

counts = single_collective("counts", "ep", "all_to_all")  # [X] -> [X]: this rank's experts, by sender


def _cross(steps: Steps, x: Value, splits: Value, coming: Value, rows: Dim, direction: str) -> Value:
    """Send token copies to their experts ("dispatch": sorted by expert on arrival), or results back to their tokens
    ("combine")."""
    ranks = steps.mesh.size("ep")
    if ranks == 1:
        return x
    if direction == "combine":
        (x,) = steps.forward("sort_chunks", x, coming, ranks=ranks, inverse=True)
    y = steps.collective("all_to_all_v", "ep", x, rows=rows, also_reads=(splits,), direction=direction)
    if direction == "combine":
        return y
    return steps.forward("sort_chunks", y, coming, ranks=ranks, inverse=False)[0]


def _redistribution(name: str, direction: str, reverse: str) -> Redistribution:
    def rows(steps: Steps, sent: Dim, way: str) -> Dim:
        return Received(steps.layer) if way == "dispatch" else sent

    def forward(steps: Steps, x: Value, splits: Value, coming: Value, sent: Value) -> tuple[Values, Values]:
        received = rows(steps, sent.shape[0], direction)
        return (_cross(steps, x, splits, coming, received, direction),), (splits, coming, sent)

    def backward(steps: Steps, kept: Values, g: Value) -> Values:
        splits, coming, sent = kept
        return (_cross(steps, g, splits, coming, rows(steps, sent.shape[0], reverse), reverse),)

    return Redistribution(name, forward, backward)


dispatch = _redistribution("dispatch", "dispatch", "combine")
combine = _redistribution("combine", "combine", "dispatch")


def blocks(direction: str, reverse: str, block: int) -> Redistribution:
    """`dispatch` or `combine` in blocks of so many rows, of which each rank sends each one. What is behind the copies
    that are there is sent, too, and read by nobody."""

    def cross(steps: Steps, x: Value, coming: Value, way: str) -> Value:
        ranks, about = steps.mesh.size("ep"), dict[str, Any]()
        about |= {"ranks": ranks, "block": block, "rows": Received(steps.layer, at_most=ranks * block)}
        if way == "combine":
            (x,) = steps.forward("sort_blocks", x, coming, inverse=True, **about)
        y = steps.collective("all_to_all", "ep", x)
        return y if way == "combine" else steps.forward("sort_blocks", y, coming, inverse=False, **about)[0]

    def forward(steps: Steps, x: Value, coming: Value) -> tuple[Values, Values]:
        return (cross(steps, x, coming, direction),), (coming,)

    def backward(steps: Steps, kept: Values, g: Value) -> Values:
        (coming,) = kept
        return (cross(steps, g, coming, reverse),)

    return Redistribution(direction, forward, backward)


def block_of(do: Do, experts: Value, count: int) -> int:
    """Rows of a block that a rank sends to another for the choices `experts` [s, B, k] of `count` experts: as many for
    each sequence of a micro-batch."""
    tokens, sequences, top_k = (size(d) for d in experts.spec.shape)
    ranks = do.mesh.size("ep")
    most = tokens * most_of_a_token(top_k, count, ranks)
    return sequences * min(most, -(-tokens * top_k * do.layout.capacity_percent // (100 * ranks)))


def senders(do: Do) -> int:
    """Ranks from which rows come to this rank's experts, each in a part of its own."""
    return 1 if do.layout.gathers_tokens else do.mesh.size("ep")


def gather_tokens(do: Do, tokens: Value, weights: Value, experts: Value) -> Values:
    """What each rank routes, [s, B, ..], for all that share experts, [ep·s, B, ..]."""
    tokens, experts = do.redistribute(ep_all_gather, tokens), do.redistribute(_indices, experts)
    return tokens, do.redistribute(ep_all_gather, weights), experts  # the order of copies needs no weights


def most_of_a_token(top_k: int, experts: int, ranks: int) -> int:
    """The most copies of a token that one of the `ranks` with the experts can get: it goes to an expert once."""
    return min(top_k, experts // ranks)


def most_rows(do: Do, experts: Value, count: int) -> int:
    """The most copies that this rank's of `count` experts can get of the tokens of `experts` [.., k]."""
    *tokens, top_k = (size(d) for d in experts.spec.shape)
    return prod(tokens) * most_of_a_token(top_k, count, do.mesh.size("ep"))


def split_sizes(do: Do, copies: Value, coming: Value) -> Value:
    """copies [X] of this rank for each expert, and those `coming` to its own by sender -> the host's sizes: what goes
    to and comes from every rank."""
    return do.op("split_sizes", copies, coming, ranks=senders(do))[0]


def offsets(do: Do, coming: Value) -> Value:
    """Copies `coming` to this rank's experts by sender -> where the rows of each begin, on the device."""
    return do.op("expert_offsets", coming, ranks=senders(do))[0]
