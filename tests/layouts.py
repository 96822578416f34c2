"""Run one layout on the pool and compare each rank with the oracle (values) and with the price (bytes, FLOPs)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import oracle
from observe import Storages, Wires
from penteract.engine.bodies.body import TorchBody
from penteract.engine.bodies.reference import REFERENCE
from penteract.engine.comm.comm import Comm
from penteract.engine.comm.groups import Groups, needed
from penteract.engine.feed import constants, micro_batch, samples_of, target_count
from penteract.engine.memory import Fresh
from penteract.engine.run import Run
from penteract.engine.state import allocate, initialise
from penteract.estimate.load import Recorded
from penteract.estimate.price import price
from penteract.spec.layout import Layout
from penteract.spec.model import ModelSpec
from penteract.step.program import Program, compile_step
from penteract.step.walk import walk
from samples import sample, stacked
from tolerances import ZERO

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One layout of one model."""

    model: ModelSpec
    layout: Layout
    sequence_length: int = 16
    schedule: str | None = None


@dataclass
class Verdict:
    """What one rank found: worst relative gradient and loss errors, and where price and run differ."""

    gradient: float = 0.0
    worst: str = ""
    loss: float = 0.0
    differences: list[str] = field(default_factory=list)
    received: int = 0


@lru_cache(maxsize=64)
def reference(m: ModelSpec, sequence_length: int, batch: int) -> tuple[dict[str, torch.Tensor], float, float]:
    """The oracle's gradients and losses for the first `batch` samples, in float64."""
    p = compile_step(m, Layout(), sequence_length, precision="fp64")
    state = allocate(p, CPU)
    initialise(p, state, 0)
    steer(state.biases)
    w = {n: t.clone().requires_grad_() for n, t in state.parameters.items()}
    samples = [sample(i, sequence_length, m.vocab_size) for i in range(batch)]
    scale = {"cross_entropy": 1 / target_count(samples)}
    if m.moe:
        scale["balance"] = m.moe.balance_coefficient / batch
    ce, balance = oracle.loss(m, w, stacked(samples), scale, state.biases)
    (ce + balance).backward()
    return {n: t.grad for n, t in w.items() if t.grad is not None}, ce.item(), balance.item()


def steer(biases: dict[str, torch.Tensor]) -> None:
    """Uneven routing: where a bias steers, expert 0 gets no token and the last one more than its share."""
    for b in biases.values():
        b[0], b[-1] = -10.0, 0.2


def run_case(
    rank: int, groups: Groups, case: Case, mutate: Callable[[Program, dict[str, TorchBody]], Program] | None = None
) -> Verdict | None:
    """One step of `case` on this rank; None when the layout has fewer ranks."""
    p = compile_step(case.model, case.layout, case.sequence_length, rank=rank % case.layout.world,
                     precision="fp64", schedule=case.schedule)  # type: ignore[arg-type]  # fmt: skip
    groups.make(needed(p))
    if rank >= case.layout.world:
        return None
    bodies = dict(REFERENCE)
    priced = p
    if mutate is not None:
        p = mutate(p, bodies)
    run = _prepare(p, groups, bodies)
    wires, flops, storages = Wires(rank), FlopCounterMode(display=False), Storages()
    alive: list[tuple[str, int]] = []
    run.on_action = lambda name: alive.append((name, _settled(priced, run, storages, len(alive))))
    with wires.watch(), flops, storages:
        walk(p, run)
    verdict = Verdict(received=sum(run.received.values()))
    _compare_values(case, p, run, verdict)
    _compare_bytes(priced, run, (wires, flops, alive), verdict)
    return verdict


def _prepare(p: Program, groups: Groups, bodies: dict[str, TorchBody]) -> Run:
    state = allocate(p, CPU)
    initialise(p, state, 0)
    steer(state.biases)
    for n, t in state.gradients.items():
        t.fill_(float("nan") if n else 0)  # whatever the first writer does not write shows
    run = Run(p, state, Comm(groups, p.rank), bodies, Fresh("fp64", CPU))
    fixed = constants(p, CPU)
    mine = [[sample(i, p.sequence_length, p.model.vocab_size) for i in ids] for ids in samples_of(p, 0)]
    run.batches = [fixed | micro_batch(p, samples, CPU) for samples in mine]
    run.counts.fill_(sum(target_count(samples) for samples in mine))
    return run


def _settled(p: Program, run: Run, storages: Storages, action: int) -> int:
    """Bytes alive after an action. The transport's threads drop finished buffers a moment late: give them that moment."""
    expected = price(p, Recorded(defaultdict(int, run.received))).kept[action][1]
    deadline = time.monotonic() + 0.5
    while (now := storages.now - _in_flight(run)) > expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return now


def _in_flight(run: Run) -> int:
    """Bytes that only a send still pins: freed from the registers, not yet off the wire."""
    held = {t.untyped_storage()._cdata for t in run.registers.values() if isinstance(t, torch.Tensor)}
    pinned = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for f in run.comm.sends for x in f.pinned}
    return sum(n for k, n in pinned.items() if k not in held)


def _compare_values(case: Case, p: Program, run: Run, verdict: Verdict) -> None:
    want, ce, balance = reference(case.model, case.sequence_length, case.layout.global_batch_size)
    for q in p.params:
        part = want[q.name]
        for dim, (at, n) in enumerate(zip(q.offset(p.mesh, p.rank), q.local_shape(p.mesh), strict=True)):
            part = part.narrow(dim, at, n)
        scale = want[q.name].abs().max().item()
        error = (run.state.gradients[q.name] - part).abs().max().item()
        error = error / scale if scale > ZERO else error
        if not error <= verdict.gradient:
            verdict.gradient, verdict.worst = error, q.name
    losses = dict(zip(p.losses, run.totals[1:-1].tolist(), strict=True))
    verdict.loss = abs(losses["cross_entropy"] - ce) + abs(losses.get("balance", 0.0) - balance)


def _compare_bytes(p: Program, run: Run, seen: tuple[Wires, FlopCounterMode, list[Any]], verdict: Verdict) -> None:
    wires, flops, alive = seen
    priced = price(p, Recorded(run.received))
    for key in sorted(set(priced.wires) | set(wires.bytes)):
        if priced.wires[key] != wires.bytes[key]:
            verdict.differences.append(f"{key}: priced {priced.wires[key]}, seen {wires.bytes[key]}")
    if priced.total_flops != flops.get_total_flops():
        verdict.differences.append(f"FLOPs: priced {priced.total_flops}, counted {flops.get_total_flops()}")
    for (action, expected), (_, observed) in zip(priced.kept, alive, strict=True):
        if expected != observed:
            verdict.differences.append(f"kept after {action}: priced {expected}, alive {observed}")


__all__ = ["Case", "Layout", "Verdict", "replace", "run_case"]
