"""The registers of a step as tensors, and the calls on them that are the same in every step.

In an arena a register lies at the same address in every step. So the first step makes its tensors, and later steps use
them again: a call whose registers are all such tensors is bound to them, with its kernel, and costs one look-up. What
has a routed size is made anew in every step, and so is everything in memory that is no arena.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penteract.engine.executor.allocator import Allocator, Arena
from penteract.engine.executor.feed import MicroBatch
from penteract.engine.kernels.kernel import Bound, Env, TorchKernel, bound, in_turn
from penteract.ops.overlap.in_parts import AXIS
from penteract.ops.spec import Received, Spec, room
from penteract.ops.tape import Call
from penteract.step.program import BufferKey, Program

Key = tuple[BufferKey, int]  # ((chunk, micro-batch), register)


@dataclass(slots=True)
class Registers:
    """Tensors by buffer and register. A step is between `begin` and `complete`.

    values    what is alive, but for what `fixed` has in later steps
    fixed     what lies at planned offsets; complete once a step has been
    bound     calls on `fixed` and on data only
    received  (layer, micro-batch) -> token copies that this rank's experts got: the sizes of routed registers
    """

    p: Program
    values: dict[Key, Any] = field(default_factory=dict[Key, Any])
    fixed: dict[Key, torch.Tensor] = field(default_factory=dict[Key, torch.Tensor])
    bound: dict[tuple[BufferKey, Call], Bound] = field(default_factory=dict[tuple[BufferKey, Call], Bound])
    received: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    memory: Allocator | None = None
    host: Arena | None = None  # for offloaded activations
    micro_batches: Sequence[MicroBatch] = ()
    reuses_fixed: bool = False  # an earlier step has made all of `fixed`
    step_complete: bool = False  # this step has made all of `fixed`

    def begin(self, memory: Allocator, host: Arena | None, micro_batches: Sequence[MicroBatch]) -> None:
        """A step begins: no register is alive. In other memory, or with other tensors of data, all is made anew."""
        self.reuses_fixed = self.step_complete and memory is self.memory and micro_batches is self.micro_batches
        if not self.reuses_fixed:
            self.fixed.clear()
            self.bound.clear()
        self.memory, self.host, self.micro_batches, self.step_complete = memory, host, micro_batches, False
        memory.begin()
        if host is not None:
            host.begin()

    def complete(self) -> None:
        """All calls of a step have been made."""
        self.step_complete = True

    def __getitem__(self, key: Key) -> Any:
        return self.fixed[key] if self.reuses_fixed and key not in self.values else self.values[key]

    def __setitem__(self, key: Key, value: Any) -> None:
        self.values[key] = value

    def read(self, buffer: BufferKey, registers: tuple[int, ...]) -> list[Any]:
        """Registers or data, as kernels take them."""
        names = self.p.chunks[buffer[0]].inputs
        return [self.micro_batches[buffer[1]][names[r]] if r in names else self[buffer, r] for r in registers]

    def make(self, buffer: BufferKey, registers: tuple[int, ...]) -> list[Any]:
        """Storage for new registers; None for what is on the host alone."""
        specs = self.p.chunks[buffer[0]].specs
        return [self._make((buffer, r), specs[r]) for r in registers]

    def free(self, buffer: BufferKey, registers: tuple[int, ...]) -> None:
        """These registers are not read again."""
        if not self.reuses_fixed:
            for r in registers:
                del self.values[buffer, r]
        elif self.values:
            for r in registers:
                self.values.pop((buffer, r), None)

    def _make(self, key: Key, spec: Spec) -> torch.Tensor | None:
        if spec.role == "host":
            return None
        if (there := self.fixed.get(key)) is not None:
            return there
        assert self.memory is not None, "a register outside of a step"
        if any(isinstance(d, Received) for d in spec.shape):
            padded = all(isinstance(d, int) or d.at_most for d in spec.shape)
            spec = Spec(tuple(room(d, lambda layer: self.received[layer, key[0][1]]) for d in spec.shape), spec.role)
            if not padded:
                return self.memory.routed(spec)
        assert not spec.pinned or self.host is not None
        made = self.host.new(spec) if spec.pinned and self.host is not None else self.memory.new(spec)
        if isinstance(self.memory, Arena):
            self.fixed[key] = made
        return made

    def bind(self, buffer: BufferKey, call: Call, made: Sequence[Any], run: Bound) -> None:
        """Let `run` make this call in later steps, if all its registers are fixed. `made`: its results."""
        if not self.fixed:
            return
        inputs = self.p.chunks[buffer[0]].inputs
        outs = zip(call.outs, made, strict=True)
        if all(r in inputs or (buffer, r) in self.fixed for r in call.ins) and all(
            y is not None and y is self.fixed.get((buffer, r)) for r, y in outs
        ):
            self.bound[buffer, call] = run


def weight_gradient_call(
    kernel: TorchKernel, env: Env, call: Call, ins: list[Any], into: Mapping[str, torch.Tensor], written: set[str]
) -> Bound:
    """A weight gradient into the gradients' buffers: added where they are in `written`, which it extends."""
    site, params, f = call.site, call.site.params, kernel.weight_gradient
    assert f is not None
    gradients, calls = [into[n] for n in params], dict[bool, Bound]()

    def run() -> None:
        add = params[0] in written
        if add not in calls:
            calls[add] = bound(f, env, site, ins, gradients, add)
        calls[add]()
        written.update(params)

    return run


def kernel_call(
    kernel: TorchKernel, env: Env, call: Call, ins: list[Any], weights: list[Any], outs: list[Any]
) -> Bound:
    """A forward or an input gradient into `outs`."""
    f = kernel.forward if call.phase == "forward" else kernel.input_gradient
    assert f is not None
    return bound(f, env, call.site, ins, weights, outs)


def call_of_rows(
    kernel: TorchKernel, env: Env, call: Call, ins: list[Any], weights: list[Any], outs: list[Any]
) -> Bound:
    """The same of this rank's share of the rows, or of all others: in two calls where these do not follow each
    other."""
    if call.fills:
        ins, outs = ins[: -call.fills], ins[-call.fills :]
    whole, me, n = len(outs[0]), env.index(AXIS), env.mesh.size(AXIS)
    share = whole // n
    own = slice(me * share, (me + 1) * share)
    others = [rows for rows in (slice(0, own.start), slice(own.stop, whole)) if rows.start < rows.stop]

    def of(rows: slice) -> Bound:
        cut = [[x[rows] if len(x) == whole else x for x in some] for some in (ins, outs)]
        return kernel_call(kernel, env, call, cut[0], weights, cut[1])

    return in_turn(*map(of, [own] if call.rows == "own" else others))
