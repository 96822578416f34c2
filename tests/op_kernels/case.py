"""One op on one set of shapes, and the inputs that it is tried on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from penteract.engine.kernels.moe.experts import Splits
from penteract.ops.spec import Role


@dataclass(frozen=True)
class In:
    """One input: drawn from a normal distribution, or given."""

    role: Role
    shape: tuple[int, ...]
    value: Any = None


@dataclass(frozen=True)
class Case:
    """One op on one set of shapes, said by rank `rank` of a layout with `tp` tensor ranks or `ep` expert ranks."""

    op_name: str
    what: str
    ins: tuple[In, ...]
    weights: tuple[tuple[int, ...], ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    tp: int = 1
    rank: int = 0
    beside: tuple[In, ...] = ()  # what the formula knows of other ranks
    ep: int = 1

    def __str__(self) -> str:
        return f"{self.op_name}: {self.what}"


def x(*shape: int) -> In:
    return In("compute", shape)


def stat(*shape: int) -> In:
    return In("stat", shape)


def given(value: Any, role: Role = "index") -> In:
    if role == "host":
        return In(role, (), value)
    t = torch.as_tensor(value, dtype=torch.int64 if role == "index" else torch.float64)
    return In(role, tuple(t.shape), t)


def draw(high: int, *shape: int, low: int = 0) -> In:
    return given(torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape) + high)))


def order(n: int) -> In:
    return given(torch.randperm(n, generator=torch.Generator().manual_seed(n)))


def splits(*table: list[int]) -> In:
    """Rows of each local expert (columns) from each rank (rows)."""
    return given(Splits([0] * len(table), [sum(row) for row in table], [list(row) for row in table]), "host")


def positive(*shape: int) -> In:
    return given(torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) + 0.5, "stat")


def fp8_data(*shape: int) -> In:
    """Data in e4m3, all of them numbers."""
    drawn = torch.randint(0, 127, shape, generator=torch.Generator().manual_seed(sum(shape)))
    return In("fp8", shape, (drawn + 128 * (drawn % 2)).to(torch.uint8))


def of_fp8(tokens: tuple[int, ...], width: int) -> tuple[In, ...]:
    """What `fp8_linear` reads: x, its rowwise data, columnwise data, their scale."""
    return x(*tokens, width), fp8_data(*tokens, width), fp8_data(width, math.prod(tokens)), given([2.0**-7], "stat")


def behind(there: int, rows: int, width: int) -> In:
    """[rows, width], of which the last are not there: what must not be read spoils all that it is added to."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    x[there:] = math.nan
    return In("compute", (rows, width), x)
