"""What the private functions of flash-attn-4 promise on compute capability 9.0, by plain arithmetic.

Their results go to given tensors, of any rows whose strides are multiples of 16 bytes; their workspace is allocated
under the caller's eyes, the arithmetic is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from op_kernels.aten import _attend, _hidden, _runs, _stat

INT = torch.int32


def _aligned(x: torch.Tensor, by: int = 16) -> torch.Tensor:
    """x, or the copy that the library makes."""
    assert x.stride(-1) == 1
    size = x.element_size()
    there = x.storage_offset() * size % by == 0
    if x.is_contiguous():
        return x if there else x.clone()
    return x if there and all(s * size % by == 0 for s in x.stride()[:-1]) else x.contiguous()


def _checked(x: torch.Tensor, like: torch.Size | tuple[int, ...], by: int = 16) -> None:
    assert x.shape == like
    assert _aligned(x, by) is x


def _up(n: int, by: int) -> int:
    return (n + by - 1) // by * by


class Fa4:
    """Stands for `flash_attn.cute.interface`."""

    def _flash_attn_fwd(  # noqa: PLR0913
        self, q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool, window_size_left: int | None,
        return_lse: bool, out: Any, lse: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    ) -> None:  # fmt: skip
        assert causal
        assert return_lse
        copies = [y for x in (q, k, v) if (y := _aligned(x)) is not x]
        _checked(out, q.shape)
        rows = (len(q), q.shape[2], q.shape[1]) if cu_seqlens_q is None else (q.shape[1], len(q))
        _checked(lse, rows, 4)
        assert lse.dtype == _stat(q)
        heads, times = q.shape[-2:], q.shape[-2] // k.shape[-2]
        if cu_seqlens_q is not None and (count := len(cu_seqlens_q) - 1) > 256:
            tile = 192 if heads[1] <= 96 else 128
            blocks = (len(q) * times + count * (tile - 1)) // tile + 1
            copies += [torch.empty(count + 1, dtype=INT), torch.empty(blocks, dtype=INT)]
        left = -1 if window_size_left is None else window_size_left

        def fill() -> None:
            for at, keys, place in _places(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
                y, s = _attend(q[at].to(_stat(q)), k[keys].to(_stat(q)), v[keys].to(_stat(q)), softmax_scale, left)
                out[at], lse[place] = y.to(q.dtype), s

        _hidden(fill)
        del copies

    def _flash_attn_bwd(  # noqa: PLR0913
        self, q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *, softmax_scale: float, causal: bool,
        window_size_left: int | None, dq: Any, dk: Any, dv: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, deterministic: bool = False,
    ) -> None:  # fmt: skip
        assert causal
        for x, like in ((dq, q), (dk, k), (dv, v)):
            _checked(x, like.shape)
        assert out.shape == dout.shape == q.shape
        temporary = [y for x in (q, k, v, out, dout, lse) if (y := _aligned(x)) is not x]
        temporary += self._sums(q, k, cu_seqlens_q)
        if deterministic:
            temporary += _turns(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
        left = -1 if window_size_left is None else window_size_left

        def fill() -> None:
            for at, keys, place in _places(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, empty=True):
                dk[keys] = dv[keys] = 0
                if not q[at].numel():
                    continue
                parts = [x.detach().to(_stat(q)).requires_grad_() for x in (q[at], k[keys], v[keys])]
                y, s = _attend(*parts, softmax_scale, left)
                torch.testing.assert_close(lse[place], s.detach().to(lse.dtype), rtol=1e-3, atol=1e-3)
                torch.testing.assert_close(out[at].to(_stat(q)), y.detach(), rtol=2e-2, atol=2e-2)
                slopes = torch.autograd.grad((y * dout[at].to(_stat(q))).sum(), parts)
                for into, here, slope in zip((dq, dk, dv), (at, keys, keys), slopes, strict=True):
                    into[here] = slope.to(into.dtype)

        _hidden(fill)
        del temporary

    def _sums(self, q: torch.Tensor, k: torch.Tensor, lists: Any) -> list[torch.Tensor]:
        """fp32, whatever the inputs are."""
        (heads, size), kv = q.shape[-2:], k.shape[-2]
        block, padded = (128 if size <= 64 else 64), _up(size, 32)
        if lists is None:
            first, n, t = (len(q),), _up(q.shape[1], block), _up(k.shape[1], 128)
        else:
            first = ()
            n, t = ((m + len(lists) * by - 1) // by * by for m, by in ((len(q), block), (len(k), 128)))
        made = [torch.empty(*first, heads, n * padded), *(torch.empty(*first, heads, n) for _ in range(2))]
        if kv < heads:
            made += [torch.zeros(*first, kv, t * padded) for _ in range(2)]
        if lists is not None and len(lists) > 257:
            made += [torch.empty(len(lists), dtype=INT) for _ in range(2)]
        return made


def _turns(q: Any, k: Any, lists: Any, max_q: int | None, max_k: int | None) -> list[torch.Tensor]:
    """Whose turn it is to add: of tiles of queries, and with grouped queries of keys, once for k and once for v."""
    (heads, size), kv = q.shape[-2:], k.shape[-2]
    count, tile = len(q) if lists is None else len(lists) - 1, 128 if size <= 64 else 64
    tiles = -(-(max_q or q.shape[1]) // tile), -(-(max_k or k.shape[1]) // 128)
    of_keys = [torch.zeros(count, kv, tiles[1], 2, dtype=INT) for _ in range(2)] if kv < heads else []
    return [torch.zeros(count, heads, tiles[0], 1, dtype=INT), *of_keys]


def _places(
    q: torch.Tensor, ends_q: Any, ends_k: Any, max_q: int | None, max_k: int | None, *, empty: bool = False
) -> Iterator[tuple[Any, Any, Any]]:
    """(which q, which keys, which log-sum-exp) of each sequence or document."""
    if ends_q is None:
        yield from ((b, b, b) for b in range(len(q)))
        return
    assert max_q is not None
    assert max_k is not None
    for rows, keys in _runs(ends_q, ends_k):
        assert rows.stop - rows.start <= max_q
        assert keys.stop - keys.start <= max_k
        if rows.stop > rows.start or empty:
            yield rows, keys, (slice(None), rows)
