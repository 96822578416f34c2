"""Context parallelism.

Split      tokens, in the whole network: rank i of n holds chunks i and 2n-1-i of 2n (zigzag, for balanced causal work).
Traffic    all_gather forward all-gather K and V          backward reduce-scatter their gradients
                      (with latent attention: the latents that K and V are computed from)
           ring       forward K and V are passed around a ring; partial attentions are merged by their log-sum-exp
                      backward the same ring; the gradients of K and V are passed along with them
           ulysses    forward all-to-all: from sharded tokens to sharded heads   backward the reverse
Costs      K and V once (all_gather), n - 1 times a share of them (ring), Q, K, V and O once (ulysses).
Helps      when one sequence does not fit. ring hides its traffic, ulysses needs enough heads, all_gather is simplest.
Papers     Liu 2023 (2310.01889); Jacobs 2023 (2309.14509); Dubey 2024 (2407.21783) §3.3.2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penteract.ops.do import Do, Redistribution, Steps, Value, Values, single_collective


def token_indices(sequence_length: int, ranks: int, rank: int) -> list[int]:
    """The tokens of a sequence that `rank` holds, in its order."""
    if ranks == 1:
        return list(range(sequence_length))
    n = sequence_length // (2 * ranks)
    return [*range(rank * n, (rank + 1) * n), *range((2 * ranks - 1 - rank) * n, (2 * ranks - rank) * n)]


# [S@cp, B, K·C] -> [S, B, K·C]
cp_all_gather = single_collective("cp_all_gather", "cp", "all_gather", "reduce_scatter")


def _to_heads(steps: Steps, x: Value) -> Value:
    """[S@cp, B, H·C] -> [S, B, H@cp·C]. The part for each rank is made contiguous first; received parts are whole
    tokens.
    """
    n = steps.mesh.size("cp")
    return x if n == 1 else steps.collective("all_to_all", "cp", steps.forward("pack_heads", x, ranks=n)[0])


def _to_tokens(steps: Steps, x: Value) -> Value:
    """The reverse: whole tokens are sent; received parts are concatenated along columns."""
    n = steps.mesh.size("cp")
    return x if n == 1 else steps.forward("unpack_heads", steps.collective("all_to_all", "cp", x), ranks=n)[0]


def _mirrored(
    name: str, there: Callable[[Steps, Value], Value], back: Callable[[Steps, Value], Value]
) -> Redistribution:
    def forward(steps: Steps, x: Value) -> tuple[Values, Values]:
        return (there(steps, x),), ()

    def backward(steps: Steps, kept: Values, g: Value) -> Values:
        return (back(steps, g),)

    return Redistribution(name, forward, backward)


to_heads = _mirrored("to_heads", _to_heads, _to_tokens)
to_tokens = _mirrored("to_tokens", _to_tokens, _to_heads)


def ring(**shape: Any) -> Redistribution:
    """Ring attention. At step i this rank has the keys and values of the rank i places before it."""

    def forward(
        steps: Steps, q: Value, k: Value, v: Value, index: Value, start: Value, *keys: Value
    ) -> tuple[Values, Values]:
        o, log_sum = q, q
        held = (k, v)
        for i, key in enumerate(keys):
            in_flight = [steps.start("shift", "cp", t) for t in held] if i < len(keys) - 1 else []
            part = steps.forward("attention", q, *held, index, start, key, **shape)
            o, log_sum = part if i == 0 else steps.forward("merge_attention", o, log_sum, *part)
            held = tuple(t.finish() for t in in_flight)
        return (o,), (q, k, v, index, start, *keys, o, log_sum)

    def backward(steps: Steps, kept: Values, g: Value) -> Values:
        q, k, v, index, start, *keys, o, log_sum = kept
        gq: Value | None = None
        travelling: Values = ()
        held = (k, v)
        for i, key in enumerate(keys):
            in_flight = [steps.start("shift", "cp", t) for t in held] if i < len(keys) - 1 else []
            arriving = [steps.start("shift", "cp", t) for t in travelling]
            ins = (q, *held, index, start, key)
            pq, pk, pv = steps.input_gradient("attention", ins, (*ins, o, log_sum), (g,), **shape)
            gq = pq if gq is None else steps.forward("add", gq, pq)[0]
            here = [t.finish() for t in arriving]
            travelling = (
                tuple(steps.forward("add", a, p)[0] for a, p in zip(here, (pk, pv), strict=True)) if here else (pk, pv)
            )
            held = tuple(t.finish() for t in in_flight)
        assert gq is not None
        home = [steps.start("shift", "cp", t) for t in travelling]
        return (gq, *(t.finish() for t in home))

    return Redistribution("ring", forward, backward)


def sources(do: Do, *values: Value) -> Values:
    """The inputs of keys and values, each [S@cp, B, ..]. With `cp_method = "all_gather"` they are gathered, [S, B, ..],
    before keys and values are computed from them, since they are smaller."""
    return tuple(do.redistribute(cp_all_gather, x) if do.layout.cp_method == "all_gather" else x for x in values)


def attend(do: Do, q: Value, k: Value, v: Value, sequence_length: int, **shape: Any) -> Value:
    """Causal attention within documents over all tokens of the sequence.

    q [S@cp, B, H·C], k [S@cp, B, K·C], v [S@cp, B, K·E] -> [S@cp, B, H·E]; `sources` may have gathered k and v
    already. `shape`: head_size (C), value_size (E), scale, window.
    """
    cp, own, batch = do.layout.cp, sequence_length // do.layout.cp, do.layout.micro_batch_size
    index, start = do.input("index", (own,)), do.input("start", (own, batch))
    if cp == 1:
        return do.op("attention", q, k, v, index, start, index, **shape)[0]
    every = do.input("index:all", (sequence_length,))
    match do.layout.cp_method:
        case "all_gather":
            k, v = (t if t.shape[0] == sequence_length else do.redistribute(cp_all_gather, t) for t in (k, v))
            return do.op("attention", q, k, v, index, start, every, **shape)[0]
        case "ring":
            keys = [index, *(do.input(f"index:{i} before", (own,)) for i in range(1, cp))]
            return do.redistribute(ring(**shape), q, k, v, index, start, *keys)
        case "ulysses":
            kv_heads = _size(k) // shape["head_size"]
            if kv_heads % cp:  # fewer KV heads than ranks: neighbouring ranks get copies
                k = do.repeat_heads(k, cp // kv_heads, shape["head_size"])
                v = do.repeat_heads(v, cp // kv_heads, shape["value_size"])
            q, k, v = (do.redistribute(to_heads, t) for t in (q, k, v))
            all_start = do.input("start:all", (sequence_length, batch))
            return do.redistribute(to_tokens, do.op("attention", q, k, v, every, all_start, every, **shape)[0])


def _size(x: Value) -> int:
    width = x.shape[-1]
    assert isinstance(width, int)
    return width
