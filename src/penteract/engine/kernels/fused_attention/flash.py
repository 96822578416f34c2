"""Fused attention on GPUs: torch's variable-length FlashAttention-2 over the documents of a sequence.

Dao 2023 (2307.08691). One call takes the cumulative lengths of runs of queries and keys, as tensors of static length.
The last query of a run sees the last key of the run, and each query before it one key less. A run is a document that
has queries in this chunk of the sequence; a first run without queries takes all earlier keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from penteract.config.rules.kernel_limits import most_documents
from penteract.engine.kernels.fused_attention.chunk_order import AttentionLayout, QueryChunk
from penteract.engine.kernels.fused_attention.normed_attention import ON_GPU, normed
from penteract.engine.kernels.fusions import packed, rotate_on_gpu_
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.ops.tape import Site


def ends(start: torch.Tensor, chunk: QueryChunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Cumulative lengths of runs: of queries, from the chunk's first token, and of keys, from the sequence's first:
    int32 [runs + 1].

    `start`: [tokens of the chunk]. Unused runs are empty, at the end.
    """
    queries = _query_ends(start, most_documents(chunk.tokens))
    keys = queries + chunk.first
    keys[:1].zero_()
    keys[1:2].copy_(start[:1])
    return queries, keys


def _query_ends(start: torch.Tensor, most: int) -> torch.Tensor:
    """[0, 0, first token of the second document, of the third, …, n, n, …], of length most + 2."""
    out = torch.zeros(most + 2, dtype=torch.int32, device=start.device)
    number = (start[1:] != start[:-1]).cumsum(0, dtype=torch.int32)  # of each token's document, from the second token
    wanted = torch.arange(1, most + 1, dtype=torch.int32, device=start.device)
    torch.searchsorted(number, wanted, out_int32=True, out=out[2:])
    out[2:].add_(1)
    return out


def _by_head(x: torch.Tensor, size: int) -> torch.Tensor:
    """[n, H·C] -> [n, H, C], a view."""
    return x.unflatten(-1, (-1, size))


def _arguments(
    site: Site, chunk: QueryChunk, lists: tuple[torch.Tensor, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of both calls: cumulative lengths, longest possible runs, no dropout, causal; scale and window."""
    window = int(site.attrs["window"])
    named = {"scale": float(site.attrs["scale"])}
    if window:
        named |= {"window_size_left": window - 1, "window_size_right": 0}
    return (*lists, chunk.tokens, chunk.end, 0.0, True), named


def _chunk_forward(aten: Any, site: Site, chunk: QueryChunk, ins: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, H·C], k [S, K·C], v [S, K·C], start [n] -> o [n, H·C], log-sum-exp [H, n]."""
    *qkv, start = ins
    size = int(site.attrs["head_size"])
    args, named = _arguments(site, chunk, ends(start, chunk))
    made = aten._flash_attention_forward(*(_by_head(x, size) for x in qkv), *args, False, **named)
    return made[0].flatten(1), made[1]


def _forward(aten: Any, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    q, k, v, _, start, _ = ins
    places = AttentionLayout.of(env, site)
    q, start = places.queries.restore(q), places.queries.restore(start)
    k, v = places.keys.restore(k), places.keys.restore(v)
    for b in range(q.shape[1]):
        for chunk in places.chunks:
            own = [q[chunk.rows, b], k[:, b], v[:, b], start[chunk.rows, b]]
            made = _chunk_forward(aten, site, chunk, own)
            places.queries.put(made[0], outs[0][chunk.rows, b])
            places.queries.put(made[1], outs[1][b, :, chunk.rows], 1)
            del made  # freed before the next call allocates


def _chunk_gradients(aten: Any, site: Site, chunk: QueryChunk, ins: Tensors) -> tuple[torch.Tensor, ...]:
    """q, k, v, start, o, log-sum-exp, gradient of o -> gradients of q [n, H·C], k [S, K·C], v. Those of keys after the
    chunk are undefined."""
    q, k, v, start, o, log_sum, g = ins
    size = int(site.attrs["head_size"])
    args, named = _arguments(site, chunk, ends(start, chunk))
    random, unused = (torch.empty(n, dtype=torch.uint64, device=q.device) for n in (2, 0))
    g, q, k, v, o = (_by_head(x, size) for x in (g, q, k, v, o))
    made = aten._flash_attention_backward(g, q, k, v, o, log_sum.contiguous(), *args, random, unused, **named)
    return tuple(x.flatten(1) for x in made)


def _input_gradient(aten: Any, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    q, k, v, _, start, _, o, log_sum, g = ins
    places = AttentionLayout.of(env, site)
    q, start, o, g = (places.queries.restore(x) for x in (q, start, o, g))
    k, v, log_sum = places.keys.restore(k), places.keys.restore(v), places.queries.restore(log_sum, 2)
    for b in range(q.shape[1]):
        for i, chunk in enumerate(places.chunks):  # the first writes gradients of all keys, others add
            rows = chunk.rows
            own = [q[rows, b], k[:, b], v[:, b], start[rows, b], o[rows, b], log_sum[b, :, rows], g[rows, b]]
            made = _chunk_gradients(aten, site, chunk, own)
            places.queries.put(made[0], outs[0][rows, b])
            for y, into in zip(made[1:], outs[1:], strict=True):
                if i == 0:
                    places.keys.put(y, into[:, b], end=chunk.end)
                else:
                    places.keys.add(y, into[:, b], chunk.end)
            del made, y


def flash(aten: Any) -> TorchKernel:
    """The kernel, calling the operators of `aten`."""
    return TorchKernel(partial(_forward, aten), partial(_input_gradient, aten))


_KERNEL = flash(torch.ops.aten)
FLASH = {
    "attention": _KERNEL,
    "packed_attention": packed(_KERNEL, rotate_on_gpu_),
    "normed_attention": normed(_KERNEL, ON_GPU),
}
