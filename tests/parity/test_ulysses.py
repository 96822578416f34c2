"""What Ulysses takes to trade heads for tokens: nothing is staged that no price knows, in the arena or beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from layouts import CPU, Case, _prepare
from observe import Watched, dropped_at_once
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.engine.comm.distributed import Distributed
from penteract.engine.comm.groups import ProcessGroups, needed
from penteract.engine.executor.allocator import Arena
from penteract.engine.kernels.reference import REFERENCE
from penteract.readings.price import price
from penteract.step.arena import plan_arena
from penteract.step.walk import walk
from pool import Pool
from tiny import SIZES

SCALARS = 1024  # bytes of a step's few numbers of one element each
# Of wide heads, so that queries, keys and values are what is largest; each parameter has a bucket of its own.
MODEL = ModelSpec(**SIZES | {"head_size": 32, "ffn_size": 32, "kv_heads": 8, "vocab_size": 32})
LAYOUTS = [
    Layout(cp=2, cp_method="ulysses", micro_batch_size=2, recompute=(), bucket_bytes=0),
    Layout(cp=4, cp_method="ulysses", recompute=("*",), schedule="zb_h1", gradient_accumulation_steps=2,
           bucket_bytes=0),
    Layout(cp=2, tp=2, cp_method="ulysses", recompute=("to_heads", "attention"), bucket_bytes=0),
]  # fmt: skip


def peaks(rank: int, groups: ProcessGroups, case: Case) -> dict[str, tuple[int, int]]:
    """What lived at once at the most, and what the price says of it."""
    p = case.compile(rank)
    groups.make(needed(p))
    priced, seen = price(p, targets_counted=False), dict[str, tuple[int, int]]()
    assert priced.peak_at != "the update"
    for name, expected in (("each by itself", priced.peak), ("beside the arena", priced.workspace)):
        run = _prepare(p, groups, dict(REFERENCE))
        if name == "beside the arena":
            run.memory = Arena(plan_arena(p), p.precision, CPU)
            assert [t.nbytes for t in run.memory.resident()] == [priced.arena]
        with Watched() as watched, dropped_at_once():
            walk(p, run, targets_counted=False)
        seen[name] = watched.peak, expected
    return seen


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_takes_at_most_what_is_priced(pool: Pool, layout: Layout, precision: str) -> None:
    told = pool.run(peaks, Case(MODEL, layout, sequence_length=96, precision=precision))
    for rank, seen in enumerate(told):
        for name, (found, priced) in seen.items():
            assert abs(priced - found) < SCALARS, (rank, name, found, priced)


@contextmanager
def listening(watched: Watched, wrong: list[str]) -> Iterator[None]:
    """Writes down what any method of `Comm` allocates."""

    def patched(name: str, real: Any) -> Any:
        def asked(self: Distributed, *said: Any) -> Any:
            before, watched.peak = watched.now, watched.now
            out = real(self, *said)
            if watched.peak > before:
                wrong.append(f"{name} {said[0]!s:.40}: {watched.peak - before}")
            return out

        return asked

    with ExitStack() as stack:
        for name in ("start", "start_uneven", "send", "receive", "sum", "largest", "finish"):
            stack.enter_context(patch.object(Distributed, name, patched(name, getattr(Distributed, name))))
        yield


def staged(rank: int, groups: ProcessGroups, case: Case) -> list[str]:
    p = case.compile(rank)
    groups.make(needed(p))
    run, wrong = _prepare(p, groups, dict(REFERENCE)), list[str]()
    with Watched() as watched, listening(watched, wrong):
        walk(p, run, targets_counted=False)
        run.settle_parameters()
    return wrong


EXPERTS = ModelSpec(**SIZES, moe=MoESpec(experts=4, top_k=2, ffn_size=24, balance="bias"))


@pytest.mark.parametrize(("model", "layout"), [
    *((MODEL, layout) for layout in LAYOUTS),
    (EXPERTS, Layout(dp=2, ep=2, pp=2, zero=3, gradient_accumulation_steps=2)),
    (EXPERTS, Layout(cp=2, tp=2, cp_method="ring", zero=1)),
    (EXPERTS, Layout(dp=4, ep=2, zero=2, shard_group=2, gradient_accumulation_steps=2)),
], ids=str)  # fmt: skip
def test_no_collective_allocates(pool: Pool, model: ModelSpec, layout: Layout) -> None:
    assert pool.run(staged, Case(model, layout)) == [[]] * layout.world


def test_a_staged_piece_would_be_seen(pool: Pool) -> None:
    assert pool.run(clumsy, Case(MODEL, LAYOUTS[0]))[0]


def clumsy(rank: int, groups: ProcessGroups, case: Case) -> list[str]:
    start = Distributed.start

    def copying(self: Distributed, kind: str, ranks: Any, x: torch.Tensor, *said: Any) -> Any:
        return start(self, kind, ranks, x.clone() if kind == "all_to_all" else x, *said)

    with patch.object(Distributed, "start", copying):
        return staged(rank, groups, case)
