"""Faults that are put into a run on purpose, each on one rank or in one rule: what a rehearsal must name.

A fault changes the trainer of a rank before its first step, or (by a patch) a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from penteract.engine.executor.executor import Executor
from penteract.engine.kernels import dense
from penteract.engine.kernels.kernel import TorchKernel
from penteract.engine.session import trainer as trainer_module
from penteract.measure.rehearse import wires
from penteract.ops.declarations import OPS
from penteract.ops.declarations.forms import TensorForm
from penteract.ops.lower import Instruction
from penteract.schedule.actions import P2PBatch
from penteract.step.events import Around
from penteract.step.program import Program

Fault = Callable[[ExitStack], None]
RANK = 1  # whose program a fault changes, where it changes one


def _compiled(stack: ExitStack, change: Callable[[Program], Program]) -> None:
    """The program of one rank, changed as it is compiled."""
    real = trainer_module.compile_run

    def compiled(*about: Any, training: bool = True, **named: Any) -> Program:
        made = real(*about, training=training, **named)
        return change(made) if training and made.rank == RANK else made

    stack.enter_context(patch.object(trainer_module, "compile_run", compiled))


def _walked(stack: ExitStack, change: Callable[[Program], Program]) -> None:
    """The program of one rank, changed as it is walked: its arena is that of the sound one."""
    real = trainer_module.walk

    def walked(p: Program, *about: Any, **named: Any) -> None:
        real(change(p) if p.rank == RANK else p, *about, **named)

    stack.enter_context(patch.object(trainer_module, "walk", walked))


def _without(p: Program, *kinds: str) -> Program:
    """A program without some events of its buckets."""
    left = {at: [tuple(e for e in some if e[0] not in kinds) for some in both] for at, both in p.events.items()}
    return replace(p, events={at: Around(*both) for at, both in left.items()})


def _instructions(p: Program, action: str, change: Callable[[list[Instruction]], list[Instruction]]) -> Program:
    """A program whose first chunk has other instructions in an action."""
    first, *others = p.chunks
    actions = dict(first.actions)
    actions[action] = tuple(change(list(actions[action])))  # type: ignore[index]
    return replace(p, chunks=(replace(first, actions=actions), *others))


# ---- messages ----------------------------------------------------------------------------------------------------


def send_left_out(stack: ExitStack) -> None:
    def change(p: Program) -> Program:
        batches = [(i, a) for i, a in enumerate(p.actions) if isinstance(a, P2PBatch)]
        at, last = [(i, a) for i, a in batches if any(t.kind == "Send" for t in a.transfers)][-1]
        actions = list(p.actions)
        actions[at] = P2PBatch(tuple(t for t in last.transfers if t.kind != "Send"))
        return replace(p, actions=tuple(actions))

    _compiled(stack, change)


def message_in_another_dtype(stack: ExitStack) -> None:
    real = wires.RehearsedComm.send

    def send(self: Any, x: torch.Tensor, *about: Any) -> Any:
        return real(self, x.to(torch.float64) if self.rank == RANK else x, *about)

    stack.enter_context(patch.object(wires.RehearsedComm, "send", send))


# ---- collectives -------------------------------------------------------------------------------------------------


def group_never_made(stack: ExitStack) -> None:
    real = wires.needed
    stack.enter_context(patch.object(wires, "needed", lambda p: [r for r in real(p) if (0, 1) not in r.groups]))


def collectives_in_another_order(stack: ExitStack) -> None:
    """Two buckets of a group change places."""
    real, held = Executor.reduce, dict[int, int]()

    def reduce(self: Executor, bucket: int) -> None:
        if self.p.rank != RANK:
            return real(self, bucket)
        if not held:
            held[0] = bucket
            return None
        real(self, bucket)
        if bucket == held[0] + 1:
            real(self, held[0])
        return None

    stack.enter_context(patch.object(Executor, "reduce", reduce))


def collective_left_out(stack: ExitStack) -> None:
    """The sum of the totals, on one rank."""
    real = Executor.all_reduce

    def all_reduce(self: Executor, reduction: Any) -> None:
        if self.p.rank != RANK:
            real(self, reduction)

    stack.enter_context(patch.object(Executor, "all_reduce", all_reduce))


def no_wires_at_all(stack: ExitStack) -> None:
    """A rank that starts nothing."""
    real = wires.WireLog.start

    def start(self: wires.WireLog, *about: Any, **named: Any) -> Any:
        return real(self if self.findings.rank != RANK else wires.WireLog(self.findings), *about, **named)

    stack.enter_context(patch.object(wires.WireLog, "start", start))


# ---- registers ---------------------------------------------------------------------------------------------------


def register_freed_too_early(stack: ExitStack) -> None:
    """What the last instruction of a forward pass reads is freed after the one before."""

    def change(found: list[Instruction]) -> list[Instruction]:
        at = next(i for i in range(len(found) - 1, 0, -1) if {*found[i].frees} & {*found[i].call.ins})
        early = tuple(r for r in found[at].frees if r in found[at].call.ins)
        found[at - 1] = replace(found[at - 1], frees=(*found[at - 1].frees, *early))
        found[at] = replace(found[at], frees=tuple(r for r in found[at].frees if r not in early))
        return found

    _walked(stack, lambda p: _instructions(p, "Bwd", change))


def free_left_out(stack: ExitStack) -> None:
    def change(found: list[Instruction]) -> list[Instruction]:
        at = next(i for i, instruction in enumerate(found) if instruction.frees)
        found[at] = replace(found[at], frees=())
        return found

    _walked(stack, lambda p: _instructions(p, "Fwd", change))


def wait_left_out(stack: ExitStack) -> None:
    """A collective whose result is read without its finish."""

    def change(found: list[Instruction]) -> list[Instruction]:
        at = next(i for i, instruction in enumerate(found) if instruction.call.phase == "finish")
        dropped = found.pop(at)
        found[at] = replace(found[at], frees=(*found[at].frees, *dropped.frees))
        return found

    _walked(stack, lambda p: _instructions(p, "Fwd", change))


def registers_over_each_other(stack: ExitStack) -> None:
    real = trainer_module.plan_arena

    def planned(p: Program, **named: Any) -> Any:
        made = real(p, **named)
        first = next(at for at in made.offsets if at is not None)
        return replace(made, offsets=tuple(None if at is None else first for at in made.offsets))

    stack.enter_context(patch.object(trainer_module, "plan_arena", planned))


# ---- kernels -----------------------------------------------------------------------------------------------------


def shape_refused(stack: ExitStack) -> None:
    """A kernel that takes rows of at most 16 numbers."""

    def takes(forms: Any) -> str:
        wide = [f for f in forms if isinstance(f, TensorForm) and f.shape and f.shape[-1] > 16]
        return f"rows of {wide[0].text()} are wider than 16" if wide else ""

    op = OPS["rms_norm"]
    last = op.implementations[-1]
    changed = op._replace(implementations=(*op.implementations[:-1], replace(last, takes=takes)))
    stack.enter_context(patch.dict(OPS, {"rms_norm": changed}))


def workspace_not_declared(stack: ExitStack) -> None:
    real: TorchKernel = dense.DENSE["swiglu"]

    def forward(*about: Any) -> None:
        _kept = torch.empty_like(about[2][0]).repeat(2, *[1] * (about[2][0].dim() - 1))
        real.forward(*about)

    stack.enter_context(patch.dict(dense.DENSE, {"swiglu": replace(real, forward=forward)}))


# ---- buckets -----------------------------------------------------------------------------------------------------


def bucket_never_gathered(stack: ExitStack) -> None:
    _compiled(stack, lambda p: _without(p, "gather"))


def gather_not_waited_for(stack: ExitStack) -> None:
    _compiled(stack, lambda p: _without(p, "wait_all_gather"))


def update_of_what_is_not_reduced(stack: ExitStack) -> None:
    _compiled(stack, lambda p: _without(p, "reduce", "wait_reduce_scatter"))


def gradient_buffer_not_acquired(stack: ExitStack) -> None:
    _compiled(stack, lambda p: _without(p, "acquire_gradient_buffer"))
