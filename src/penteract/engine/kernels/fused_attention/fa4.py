"""Fused attention on Hopper: FlashAttention-4 (package flash-attn-4), which reads and writes registers as they lie.

Its public functions allocate results, so the private ones beneath are called. They are those of one version
(`config/rules/kernel_limits.py`); `tests/op_kernels/test_fa4.py` holds their signatures where the package is installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

from penteract.config.rules.kernel_limits import ATTENTION, HOPPER
from penteract.engine.kernels.fused_attention.chunk_order import AttentionLayout, ChunkOrder, QueryChunk, read_by
from penteract.engine.kernels.fused_attention.compiled import FOLDER, keep_compiled
from penteract.engine.kernels.fused_attention.flash import ends
from penteract.engine.kernels.fused_attention.normed_attention import ON_GPU, normed
from penteract.engine.kernels.fusions import packed, rotate_on_gpu_
from penteract.engine.kernels.kernel import Apart, Bindable, Bound, Env, Tensors, TorchKernel, WithoutGpu
from penteract.ops.tape import Site

Library = Callable[[], Any]  # -> the module with `_flash_attn_fwd` and `_flash_attn_bwd`


@cache
def library() -> Any:
    """The package, imported when a run needs it: that takes seconds."""
    keep_compiled(HOPPER)
    return import_module(ATTENTION["fa4"].module)


def _heads(x: torch.Tensor, size: int) -> torch.Tensor:
    """[.., H·C] -> [.., H, C], a view."""
    return x.unflatten(-1, (-1, size))


def _batch(x: torch.Tensor, size: int) -> torch.Tensor:
    """[s, B, H·C] -> [B, s, H, C], a view."""
    return _heads(x, size).transpose(0, 1)


def _about(site: Site) -> dict[str, Any]:
    """Arguments of all calls. A window counts the token itself."""
    window = int(site.attrs["window"])
    return {
        "softmax_scale": float(site.attrs["scale"]),
        "causal": True,
        "window_size_left": window - 1 if window else None,
    }


def _back(env: Env, site: Site) -> dict[str, Any]:
    """Arguments of backward's calls: it adds gradients in any order, or in the same order whenever it is called."""
    return _about(site) | ({"deterministic": True} if env.mesh.layout.determinism == "bitwise" else {})


def _room(into: torch.Tensor, *, direct: bool) -> torch.Tensor:
    """Where a result is made: in its register, or in a temporary in the order of the sequence."""
    return into if direct else torch.empty(into.shape, dtype=into.dtype, device=into.device)


# ---- whole sequences -------------------------------------------------------------------------------------------------


def _forward(lib: Library, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    """q, k, v -> o [s, B, H·C], log-sum-exp [B, H, s]."""
    size, places, about = int(site.attrs["head_size"]), AttentionLayout.of(env, site), _about(site)
    read, direct = read_by(places.keys, ins[:3], partial(_batch, size=size)), places.queries.whole
    into = _batch(outs[0], size)

    def run() -> None:
        o, log_sum = (_room(x, direct=direct) for x in outs)
        out = into if direct else _batch(o, size)
        lib()._flash_attn_fwd(*read(), **about, return_lse=True, out=out, lse=log_sum)
        _put(places.queries, o, outs[0])
        _put(places.queries, log_sum, outs[1], 2)

    return run


def _put(order: ChunkOrder, made: torch.Tensor, into: torch.Tensor, dim: int = 0, end: int | None = None) -> None:
    """Write `made`, in sequence order, into `into` in stored order, with zeros from token `end` on along `dim`; nothing
    if the kernel wrote into it."""
    if made is not into:
        order.put(made, into, dim, end)


def _input_gradient(lib: Library, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
    q, k, v, _, _, _, o, log_sum, g = ins
    size, order, about = int(site.attrs["head_size"]), AttentionLayout.of(env, site).queries, _back(env, site)
    read = read_by(order, (q, k, v, o, g), partial(_batch, size=size))
    into = [_batch(x, size) for x in outs]

    def run() -> None:
        made = [_room(x, direct=order.whole) for x in outs]
        dq, dk, dv = into if order.whole else [_batch(x, size) for x in made]
        lib()._flash_attn_bwd(*read(), order.restore(log_sum, 2), **about, dq=dq, dk=dk, dv=dv)
        for y, there in zip(made, outs, strict=True):
            _put(order, y, there)

    return run


# ---- documents -------------------------------------------------------------------------------------------------------


def _varlen(chunk: QueryChunk, start: torch.Tensor) -> dict[str, Any]:
    """Arguments of both calls: the documents of a chunk whose tokens see from `start` [n] on."""
    queries, keys = ends(start, chunk)
    return {
        "cu_seqlens_q": queries,
        "cu_seqlens_k": keys,
        "max_seqlen_q": chunk.tokens,
        "max_seqlen_k": chunk.end,
    }


def _documents(lib: Library, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    """Sequence after sequence, and of a context rank chunk after chunk."""
    q, k, v, _, start, _ = ins
    size, places = int(site.attrs["head_size"]), AttentionLayout.of(env, site)
    q, start = places.queries.restore(q), places.queries.restore(start)
    k, v = places.keys.restore(k), places.keys.restore(v)
    for b in range(q.shape[1]):
        for chunk in places.chunks:
            rows, into = chunk.rows, (outs[0][chunk.rows, b], outs[1][b, :, chunk.rows])
            varlen = _varlen(chunk, start[rows, b])
            o, log_sum = (_room(x, direct=places.queries.whole) for x in into)
            q_, k_, v_ = (_heads(x, size) for x in (q[rows, b], k[:, b], v[:, b]))
            lib()._flash_attn_fwd(
                q_, k_, v_, **varlen, **_about(site), return_lse=True, out=_heads(o, size), lse=log_sum
            )  # fmt: skip
            _put(places.queries, o, into[0])
            _put(places.queries, log_sum, into[1], 1)
            del varlen, o, log_sum  # before the next call makes its own


def _documents_input(lib: Library, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    q, k, v, _, start, _, o, log_sum, g = ins
    size, places = int(site.attrs["head_size"]), AttentionLayout.of(env, site)
    q, start, o, g = (places.queries.restore(x) for x in (q, start, o, g))
    k, v, log_sum = places.keys.restore(k), places.keys.restore(v), places.queries.restore(log_sum, 2)
    for b in range(q.shape[1]):
        for i, chunk in enumerate(places.chunks):  # the first writes gradients of all keys, others add
            rows, into = chunk.rows, (outs[0][chunk.rows, b], outs[1][:, b], outs[2][:, b])
            varlen = _varlen(chunk, start[rows, b])
            direct = (places.queries.whole, places.keys.whole, places.keys.whole)
            made = [_room(x, direct=there) for x, there in zip(into, direct, strict=True)]
            tensors = [_heads(x, size) for x in (q[rows, b], k[:, b], v[:, b], o[rows, b], g[rows, b])]
            dq, dk, dv = (_heads(x, size) for x in made)
            logs = log_sum[b, :, rows].contiguous()
            lib()._flash_attn_bwd(*tensors, logs, **varlen, **_back(env, site), dq=dq, dk=dk, dv=dv)
            _put(places.queries, made[0], into[0])
            for y, x in zip(made[1:], into[1:], strict=True):
                if i == 0:
                    _put(places.keys, y, x, end=chunk.end)
                else:
                    places.keys.add(y, x, chunk.end)
            del varlen, logs, made, dq, dk, dv, y


def whole(lib: Library) -> TorchKernel:
    """The kernel of whole sequences, over the functions of `lib`."""
    return TorchKernel(Bindable(partial(_forward, lib)), Bindable(partial(_input_gradient, lib)))


def documents(lib: Library) -> TorchKernel:
    """The kernel of documents that share sequences, over the functions of `lib`."""
    return TorchKernel(partial(_documents, lib), partial(_documents_input, lib))


def _ways(kernel: TorchKernel) -> dict[str, TorchKernel]:
    """As registers lie."""
    return {
        "attention": kernel,
        "packed_attention": packed(kernel, rotate_on_gpu_),
        "normed_attention": normed(kernel, ON_GPU),
    }


def _load() -> str:
    library()
    return os.environ.get(FOLDER, "")


def _apart(apart: Apart) -> None:
    """A backward pass has four kernels: each is made, and then kept, as soon as the call comes to it."""
    cute: Any = import_module("cutlass.cute")
    cute.compile = apart(cute.compile)


_SM = "sm_{}{}".format(*HOPPER)
# How many multiprocessors a GPU has decides how the package divides little work: as many as an H100 and an H200 with
# NVLink have.
WITHOUT_GPU = dict.fromkeys(
    ("FA4", "FA4_DOCUMENTS"),
    WithoutGpu(
        {"FLASH_ATTENTION_ARCH": _SM, "CUTE_DSL_ARCH": f"{_SM}a", "FLASH_ATTENTION_NUM_SMS": "132"}, _load, _apart
    ),
)
PACKAGES = dict.fromkeys(("FA4", "FA4_DOCUMENTS"), lambda: library())  # imported before a run's first step
FA4, FA4_DOCUMENTS = _ways(whole(library)), _ways(documents(library))
