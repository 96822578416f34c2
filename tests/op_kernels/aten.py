"""What torch's fused attention operators promise, by plain arithmetic: the same signatures, shapes and poison.

Their workspace is allocated under the caller's eyes, the arithmetic is not: a caller that counts storages sees what the
operators would allocate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

NAN = float("nan")
Runs = list[tuple[slice, slice]]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int) -> tuple[Any, Any]:
    """q [n, H, C], k and v [m, K, C]: the last query sees the last key. -> o [n, H, C], log-sum-exp [H, n]"""
    times, (n, m) = q.shape[1] // k.shape[1], (len(q), len(k))
    k, v = (x.repeat_interleave(times, 1) for x in (k, v))
    behind = torch.arange(n)[:, None] + m - n - torch.arange(m)
    hidden = (behind < 0) | (behind > left if left >= 0 else False)
    scores = (torch.einsum("nhc,mhc->hnm", q, k) * scale).masked_fill(hidden, -torch.inf)
    return torch.einsum("hnm,mhc->nhc", scores.softmax(-1), v), scores.logsumexp(-1)


def _runs(ends_q: torch.Tensor, ends_k: torch.Tensor) -> Runs:
    assert ends_q.dtype == ends_k.dtype == torch.int32
    assert ends_q[0] == ends_k[0] == 0
    pairs = zip(ends_q.tolist(), ends_k.tolist(), strict=True)
    last: tuple[int, int] | None = None
    out: Runs = []
    for at in pairs:
        if last is not None:
            assert last[0] <= at[0]
            assert last[1] <= at[1]
            out.append((slice(last[0], at[0]), slice(last[1], at[1])))
        last = at
    return out


def _stat(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _hidden(f: Callable[..., Any]) -> Any:
    with _disable_current_modes(), torch.enable_grad():
        return f()


def _check(*tensors: torch.Tensor) -> None:
    assert all(x.stride(-1) == 1 for x in tensors)


class Aten:
    """Stands for `torch.ops.aten`."""

    def _flash_attention_forward(  # noqa: PLR0913
        self, q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, max_q: int, max_k: int, dropout: float, causal: bool,
        debug: bool, *, scale: float, window_size_left: int = -1, window_size_right: int = 0,
    ) -> tuple[Any, ...]:  # fmt: skip
        _check(q, k, v)
        assert causal
        assert (dropout, debug, window_size_right) == (0.0, False, 0)
        o = torch.full(q.shape, NAN, dtype=q.dtype)
        log_sum = torch.full((q.shape[1], len(q)), NAN, dtype=_stat(q))
        random = torch.zeros(3, dtype=torch.uint64)

        def fill() -> None:
            for rows, keys in _runs(ends_q, ends_k):
                assert rows.stop - rows.start <= max_q
                assert keys.stop - keys.start <= max_k
                if rows.stop > rows.start:
                    y, s = _attend(q[rows].to(_stat(q)), k[keys].to(_stat(q)), v[keys].to(_stat(q)), scale,
                                   window_size_left)  # fmt: skip
                    o[rows], log_sum[:, rows] = y.to(q.dtype), s

        _hidden(fill)
        return o, log_sum, random, None, None

    def _flash_attention_backward(  # noqa: PLR0913
        self, g: Any, q: Any, k: Any, v: Any, o: Any, log_sum: Any, ends_q: Any, ends_k: Any, max_q: int, max_k: int,
        dropout: float, causal: bool, random: Any, unused: Any, *, scale: float, window_size_left: int = -1,
        window_size_right: int = 0,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Its sums are in full precision, 128 rows apart; of grouped heads it makes gradients by query head first."""
        _check(g, q, k, v, o)
        assert causal
        assert log_sum.is_contiguous()
        assert log_sum.shape == (q.shape[1], len(q))
        (n, heads, size), runs = q.shape, len(ends_q) - 1
        rounded = (size + 31) // 32 * 32
        temporary = [torch.empty(n + 128 * runs, heads, rounded, dtype=torch.float32),
                   torch.empty(heads, n + 128 * runs, dtype=torch.float32)]  # fmt: skip
        if heads != k.shape[1]:
            temporary += [torch.empty(len(k), heads, size, dtype=k.dtype) for _ in range(2)]
        temporary += [x.contiguous() for x in (g, o) if not x.is_contiguous()]
        made = [torch.full(x.shape, NAN, dtype=x.dtype) for x in (q, k, v)]

        def fill() -> None:
            for rows, keys in _runs(ends_q, ends_k):
                made[1][keys] = made[2][keys] = 0
                if rows.stop > rows.start:
                    parts = [
                        x[at].detach().to(_stat(q)).requires_grad_() for x, at in ((q, rows), (k, keys), (v, keys))
                    ]
                    y, s = _attend(*parts, scale, window_size_left)
                    torch.testing.assert_close(log_sum[:, rows], s.detach().to(log_sum.dtype), rtol=1e-3, atol=1e-3)
                    torch.testing.assert_close(o[rows].to(_stat(q)), y.detach(), rtol=2e-2, atol=2e-2)
                    slopes = torch.autograd.grad((y * g[rows].to(_stat(q))).sum(), parts)
                    for into, at, slope in zip(made, (rows, keys, keys), slopes, strict=True):
                        into[at] = slope.to(into.dtype)

        _hidden(fill)
        return tuple(made)

    def _scaled_dot_product_cudnn_attention(  # noqa: PLR0913
        self, q: Any, k: Any, v: Any, bias: Any, log: bool, dropout: float, causal: bool, debug: bool, *, scale: float
    ) -> tuple[Any, ...]:
        """[B, H, s, C]; o lies as q does."""
        _check(q, k, v)
        assert (bias, log, dropout, causal, debug) == (None, True, 0.0, True, False)
        o = torch.empty(q.permute(2, 0, 1, 3).shape, dtype=q.dtype).permute(1, 2, 0, 3)
        log_sum = torch.empty(*q.shape[:3], 1, dtype=_stat(q))
        random = [torch.zeros(17, dtype=torch.int64) for _ in range(2)]

        def fill() -> None:
            for b in range(len(q)):
                y, s = _attend(*(x[b].transpose(0, 1).to(_stat(q)) for x in (q, k, v)), scale, -1)
                o[b], log_sum[b, ..., 0] = y.transpose(0, 1).to(o.dtype), s

        _hidden(fill)
        return o, log_sum, None, None, q.shape[2], k.shape[2], *random, None

    def _scaled_dot_product_cudnn_attention_backward(  # noqa: PLR0913
        self, g: Any, q: Any, k: Any, v: Any, o: Any, log_sum: Any, seed: Any, offset: Any, bias: Any, ends_q: Any,
        ends_k: Any, max_q: int, max_k: int, dropout: float, causal: bool, *, scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        _check(g, q, k, v, o)
        assert log_sum.shape == (*q.shape[:3], 1)
        temporary = [torch.empty(q.shape, dtype=torch.float32), torch.empty(q.shape[:3], dtype=torch.float32)]
        temporary += [torch.empty(256, dtype=torch.uint8)]
        if k.shape[1] < q.shape[1]:
            temporary += [torch.empty(q.shape, dtype=q.dtype) for _ in range(2)]
        made = [torch.empty_like(x) for x in (q, k, v)]

        def fill() -> None:
            for b in range(len(q)):
                parts = [x[b].transpose(0, 1).detach().to(_stat(q)).requires_grad_() for x in (q, k, v)]
                y, s = _attend(*parts, scale, -1)
                torch.testing.assert_close(log_sum[b, ..., 0], s.detach().to(log_sum.dtype), rtol=1e-3, atol=1e-3)
                slopes = torch.autograd.grad((y * g[b].transpose(0, 1).to(_stat(q))).sum(), parts)
                for into, slope in zip(made, slopes, strict=True):
                    into[b] = slope.transpose(0, 1).to(into.dtype)

        _hidden(fill)
        del temporary
        return tuple(made)
