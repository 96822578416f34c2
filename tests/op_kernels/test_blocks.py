"""Copies of tokens go to the ranks of their experts in blocks, and back, with the same results as by exact sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.precision.policy import RECIPES
from penteract.engine.kernels.kernel import Env
from penteract.engine.kernels.reference import REFERENCE
from penteract.ops.declarations.one_pass import ONE_PASS
from penteract.ops.tape import Site

RANKS, EXPERTS, K, TOKENS, WIDTH = 2, 4, 2, 7, 3
OWN = EXPERTS // RANKS


def call(op_name: str, ins: list[Any], *shapes: tuple[int, ...], env: Env | None = None, **attrs: Any) -> list[Any]:
    """A forward, into registers that are full of what must not be read."""
    index = op_name in ("expert_permutation", "block_places")
    outs = [torch.full(s, -1) if index else torch.full(s, math.nan, dtype=torch.float64) for s in shapes]
    REFERENCE[op_name].forward(env or environment(), Site(op_name, (), (), attrs=attrs), ins, [], outs)
    return outs


def environment(*, noted: bool = True) -> Env:
    overflow = torch.zeros((), dtype=torch.float64) if noted else None
    return Env(Mesh(Layout()), 0, torch.float64, overflow=overflow)


class Sender:
    """A rank with tokens of its own, each of which chooses two experts."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(TOKENS, 1, WIDTH, generator=generator, dtype=torch.float64)
        self.w = torch.rand(TOKENS, 1, K, generator=generator, dtype=torch.float64)
        scores = torch.rand(TOKENS, 1, EXPERTS, generator=generator)
        self.experts = scores.topk(K, -1).indices
        n = TOKENS * K
        self.order, self.copies = call("expert_permutation", [self.experts], (n,), (EXPERTS,), experts=EXPERTS)

    def to(self, rank: int, of: torch.Tensor) -> torch.Tensor:
        """The part of a tensor that goes to a rank."""
        return of.view(RANKS, -1, *of.shape[1:])[rank]

    @property
    def most(self) -> int:
        """The most copies that go to one rank."""
        return int(self.copies.view(RANKS, -1).sum(1).max())


SENDERS = [Sender(3), Sender(4)]


def worked(by_expert: torch.Tensor, rank: int, rows: list[int]) -> torch.Tensor:
    """Experts that are numbers: each multiplies the rows that it has."""
    factors = torch.arange(rank * OWN, (rank + 1) * OWN).add(2).repeat_interleave(torch.tensor(rows))
    made = torch.full_like(by_expert, math.nan)
    made[: len(factors)] = by_expert[: len(factors)] * factors[:, None]
    return made


def in_blocks(block: int) -> list[torch.Tensor]:
    """Each sender's tokens, by blocks of so many rows."""
    n, room = TOKENS * K, RANKS * block
    about = {"ranks": RANKS, "block": block}
    places, kept = zip(*(call("block_places", [s.order, s.copies], (n,), (EXPERTS,), **about) for s in SENDERS),
                       strict=True)  # fmt: skip
    sent = [
        call("block_permute", [s.x, p], (room, WIDTH), top_k=K, **about)[0]
        for s, p in zip(SENDERS, places, strict=True)
    ]
    back = list[torch.Tensor]()
    for rank in range(RANKS):
        came = torch.cat([s.to(rank, x) for s, x in zip(SENDERS, sent, strict=True)])
        coming = torch.cat([s.to(rank, c) for s, c in zip(SENDERS, kept, strict=True)])
        about |= {"rows": room}
        (rows,) = call("sort_blocks", [came, coming], (room, WIDTH), inverse=False, **about)
        made = worked(rows, rank, coming.view(RANKS, -1).sum(0).tolist())
        back += call("sort_blocks", [made, coming], (room, WIDTH), inverse=True, **about)
    results = [torch.cat([s.to(i, x) for x in back]) for i, s in enumerate(SENDERS)]
    return [
        call("block_unpermute", [y, s.w, p], s.x.shape, top_k=K)[0]
        for y, s, p in zip(results, SENDERS, places, strict=True)
    ]


def by_exact_sizes() -> list[torch.Tensor]:
    """The same as ranks send it that know all sizes."""
    n = TOKENS * K
    sent = [call("permute", [s.x, s.order], (n, WIDTH), top_k=K)[0] for s in SENDERS]
    sizes = [s.copies.view(RANKS, -1).sum(1).tolist() for s in SENDERS]
    parts = [x.split(each) for x, each in zip(sent, sizes, strict=True)]
    back = list[tuple[torch.Tensor, ...]]()
    for rank in range(RANKS):
        came = torch.cat([part[rank] for part in parts])
        coming = torch.cat([s.to(rank, s.copies) for s in SENDERS])
        (rows,) = call("sort_chunks", [came, coming], tuple(came.shape), ranks=RANKS, inverse=False)
        made = worked(rows, rank, coming.view(RANKS, -1).sum(0).tolist())
        (made,) = call("sort_chunks", [made, coming], tuple(came.shape), ranks=RANKS, inverse=True)
        back.append(made.split([each[rank] for each in sizes]))
    results = [torch.cat([part[i] for part in back]) for i in range(RANKS)]
    return [call("unpermute", [y, s.w, s.order], s.x.shape, top_k=K)[0] for y, s in zip(results, SENDERS, strict=True)]


@pytest.mark.parametrize("more", [0, 1, 5])
def test_blocks_carry_what_exact_sizes_do(more: int) -> None:
    block = max(s.most for s in SENDERS) + more
    for got, s, want in zip(in_blocks(block), SENDERS, by_exact_sizes(), strict=True):
        factors = (s.w * (s.experts + 2)).sum(-1, keepdim=True)
        torch.testing.assert_close(want, s.x * factors)
        torch.testing.assert_close(got, want)


def test_rows_that_do_not_fit_leave_results_that_are_numbers() -> None:
    for block in (1, 2, 4):
        assert all(out.isfinite().all() for out in in_blocks(block))


def test_a_step_that_is_void_stays_so() -> None:
    env, order, copies = environment(), torch.arange(5), torch.tensor([3, 2])
    for block, void in ((3, False), (2, True), (3, True)):
        call("block_places", [order, copies], (5,), (2,), env=env, ranks=2, block=block)
        assert env.overflow is not None and bool(env.overflow.isnan()) == void


def test_what_does_not_fit_is_noted_where_somebody_asks() -> None:
    order, copies = torch.arange(5), torch.tensor([3, 2])
    places, kept = call("block_places", [order, copies], (5,), (2,), env=environment(noted=False), ranks=2, block=2)
    assert places.tolist() == [0, 1, 1, 2, 3] and kept.tolist() == [2, 2]


# ---- what is moved on GPUs ---------------------------------------------------------------------------------------


def moved(op_name: str, phase: str, ins: list[tuple[int, ...]], **attrs: Any) -> int:
    """Bytes that kernels which go over their tensors once read and write, in bfloat16."""
    kernels = ONE_PASS[op_name].traffic(phase, ins, (), attrs, RECIPES["bf16"].widths)
    assert kernels is not None
    return sum(k.moved for k in kernels)


def test_gpus_move_what_is_there_once() -> None:
    tokens, k, width, ranks, block, experts = 6, 2, 10, 2, 9, 4
    copies, about = tokens * k, {"ranks": ranks, "block": block}
    x, y, w, places = (tokens, 1, width), (ranks * block, width), (tokens, 1, k), (copies,)
    of_tokens, of_copies, of_places = 2 * tokens * width, 2 * copies * width, 8 * copies
    for phase in ("forward", "input_gradient"):
        assert moved("block_permute", phase, [x, places], top_k=k, **about) == of_tokens + of_copies + of_places
    forward = of_tokens + of_copies + 2 * copies + of_places
    assert moved("block_unpermute", "forward", [y, w, places], top_k=k) == forward
    assert moved("block_unpermute", "input_gradient", [y, w, places], top_k=k) == forward + of_copies + 2 * copies
    assert moved("block_places", "forward", [places, (experts,)], **about) == 2 * of_places + 2 * 8 * experts
    by_rows = [moved("sort_blocks", "forward", [y, (experts,)], rows=rows, inverse=inverse, **about)
               for rows in (0, 5) for inverse in (False, True)]  # fmt: skip
    assert by_rows == [by_rows[0]] * 2 + [by_rows[0] + 2 * 2 * 5 * width] * 2
