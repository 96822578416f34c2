"""One GPU: the ways to compile AdamW's plain kernel, and the sum of squares, beside a copy. Part of update_kernel.py.

Each form is held to the formulas in fp64 at `CHECKED` elements, then timed at each of `SIZES`. Bytes of an element are
those of a bf16 run: the gradient is read; master weights and moments are read and written; the parameter is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from measuring import seconds

SIZES = (10_000_000 // 4096 * 4096, 100_000_000 // 4096 * 4096, 500_000_000 // 4096 * 4096)
CHECKED = 2**20 + 16
MOVED = 4 + 3 * 8 + 2  # bytes of an element
TOLERANCE = 2.0**-19  # of what is summed: a fast division is within two units of the last place
NUMBERS = (0.05, 1e-8)  # 1 - beta2, epsilon
FACTORS = (1.0, 0.5, 0.1, 0.95, 0.2236, 0.9999, 3e-3)  # as `Factors`, of a first step


def forms() -> Iterator[Any]:
    """Tiles and warps, then one other choice at a time."""
    from penteract.engine.kernels.triton.optimizer.adamw import Form

    for tile in (1024, 2048, 4096):
        for warps in (4, 8):
            yield Form(tile, warps)
    for tile in (1024, 2048, 4096):
        yield Form(tile, 8, stream=True)
    yield Form(fused=False)
    yield from (Form(exact=True, fused=fused) for fused in (True, False))


class Shard:
    """n elements in the dtypes of a bf16 run, as a first step leaves them."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.n = n
        self.gradient, self.mean, self.master = (torch.randn(n, device=device) * 0.02 for _ in range(3))
        self.square = self.gradient.square() * 0.05
        self.parameter = self.master.bfloat16()
        self.factors = torch.tensor(FACTORS, device=device)
        self.nonfinite = torch.zeros((), device=device)

    def update(self, form: Any) -> Callable[[], None]:
        """The kernel in this form."""
        from penteract.engine.kernels.triton.optimizer.adamw import update

        return lambda: update(
            self.gradient, self.mean, self.square, self.master, self.parameter, self.factors,
            self.nonfinite, NUMBERS, decay=True, form=form,
        )  # fmt: skip

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of all that an update writes."""
        return {kind: getattr(self, kind).clone() for kind in ("mean", "square", "master", "parameter")}

    def wanted(self) -> dict[str, torch.Tensor]:
        """What an update leaves, in fp64; the parameter is rounded from the master weights."""
        gain, epsilon = NUMBERS
        good, clip, mean, square, root, decay, rate = self.factors.double().tolist()
        assert good
        g = self.gradient.double() * clip
        m = self.mean.double() + mean * (g - self.mean)
        v = self.square.double() * square + gain * g * g
        x = self.master.double() * decay - rate * m / (v.sqrt() / root + epsilon)
        return {"mean": m, "square": v, "master": x}


def held(form: Any, device: torch.device) -> dict[str, Any]:
    """The largest difference to fp64, relative to what is summed; and that a norm that is not finite changes nothing."""
    shard = Shard(CHECKED if device.type == "cuda" else 5000, device)
    before, want, run = shard.state(), shard.wanted(), shard.update(form)
    run()
    off = {
        kind: ((getattr(shard, kind).double() - x).abs() / (before[kind].abs() + x.abs() + 1e-6)).max().item()
        for kind, x in want.items()
    }
    rounded = torch.equal(shard.parameter, shard.master.bfloat16())
    after = shard.state()
    shard.factors[0], shard.gradient[3] = 0, torch.inf
    run()
    kept = all(torch.equal(x, getattr(shard, kind)) for kind, x in after.items())
    return {"off": off, "held": max(off.values()) < TOLERANCE and rounded and kept}


def compared(device: torch.device) -> list[dict[str, Any]]:
    """A row for each form: its choices, whether it holds, and TB/s by number of elements."""
    rows = [{**asdict(form), **held(form, device)} for form in forms()]
    for n in SIZES if device.type == "cuda" else (5000,):
        shard = Shard(n, device)
        for row, form in zip(rows, forms(), strict=True):
            row.setdefault("tb_a_second", {})[n] = MOVED * n / seconds(shard.update(form), device.type) * 1e-12
        del shard
    return rows


def chosen(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest form that holds, by the time of all sizes but the smallest; and whether the library has it."""
    from penteract.engine.kernels.triton.optimizer.adamw import FORM

    def time(row: Mapping[str, Any]) -> float:
        return sum(n / rate for n, rate in [*row["tb_a_second"].items()][1:] or row["tb_a_second"].items())

    best = min((row for row in rows if row["held"]), key=time)
    form = replace(FORM, **{key: best[key] for key in asdict(FORM)})
    return {"best": asdict(form), "ours": asdict(FORM), "is_ours": form == FORM}


def squares(device: torch.device) -> list[dict[str, Any]]:
    """The sum of squares of fp32 and bf16, by the kernel and by torch; and a copy of as many bytes, read and written."""
    from penteract.engine.kernels.triton.optimizer.sum_of_squares import Squares

    rows = list[dict[str, Any]]()
    for n in SIZES if device.type == "cuda" else (5000,):
        for dtype in (torch.float32, torch.bfloat16):
            x, out = torch.randn(n, device=device).to(dtype), torch.zeros((), device=device)
            ours, y = Squares(), torch.empty_like(x)

            def one(ours: Squares = ours, x: torch.Tensor = x, out: torch.Tensor = out) -> None:
                out.zero_()
                ours.add(x)
                ours.total(out)

            ways: dict[str, Callable[[], Any]] = {
                "kernel": one,
                "torch": lambda x=x: (
                    x.dot(x) if x.dtype == torch.float32 else torch.linalg.vector_norm(x, dtype=torch.float32).square()
                ),
                "copy": lambda x=x, y=y: y.copy_(x),
            }
            took = {name: seconds(run, device.type) for name, run in ways.items()}
            one()
            first, want = out.clone(), x.double().square().sum()
            one()
            rows.append({
                "elements": n, "dtype": str(dtype), "off": ((first - want) / want).abs().item(),
                "same": torch.equal(first, out), "seconds": took,
                "tb_a_second": {k: x.nbytes * (1 + (k == "copy")) / t * 1e-12 for k, t in took.items()},
            })  # fmt: skip
            rows[-1]["held"] = rows[-1]["same"] and rows[-1]["off"] < 1e-5
    return rows
