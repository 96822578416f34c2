"""How long a pass takes: the instructions of a piece on the device's one stream and its wires, as the tape puts them.

A collective runs from its `start` while its wire is free; compute waits for it at its `finish`, and no sooner. What is
waited for is exposed; nothing else says how much of the traffic is hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import fsum, prod

from penteract.estimate.load import Load
from penteract.estimate.pieces import Piece, shapes
from penteract.estimate.rates import Rates, Span
from penteract.ops.bodies import body_of
from penteract.ops.collectives import counted
from penteract.ops.spec import Spec, Widths, size
from penteract.ops.tape import Call, Site
from penteract.spec.mesh import Mesh
from penteract.units import Bytes, Seconds

Part = str  # compute, attention, pointwise, launch, or the dimension whose traffic is waited for
DIMENSION: Mapping[str, Part] = {"tp": "tensor", "cp": "context", "ep": "expert", "sequence": "expert"}


@dataclass(frozen=True, slots=True)
class Device:
    """What a pass runs on: rates, the width of a node, and the spread of a rank's groups over nodes."""

    rates: Rates
    widths: Widths
    mesh: Mesh
    gpus_per_node: int
    load: Load
    costs: dict[tuple[Site, str], tuple[Part, Seconds]] = field(
        default_factory=dict[tuple[Site, str], tuple[Part, Seconds]]
    )  # of calls that other pieces share

    def span(self, axis: str) -> Span:
        return Span.of(self.mesh.group(axis, 0), self.gpus_per_node)


@dataclass(slots=True)
class _Clock:
    """One pass under way."""

    device: Device
    specs: tuple[Spec, ...]
    now: Seconds = 0.0
    calls: int = 0
    parts: dict[Part, Seconds] = field(default_factory=lambda: defaultdict[Part, Seconds](float))
    free: dict[str, Seconds] = field(default_factory=dict[str, Seconds])  # when each axis's wire is
    lands: dict[int, Seconds] = field(default_factory=dict[int, Seconds])  # register -> when its collective is done

    def take(self, call: Call) -> None:
        self.calls += 1
        if call.phase == "start":
            self._start(call)
        elif call.phase == "finish":
            self._wait(call)
        else:
            self._compute(call)

    def _start(self, call: Call) -> None:
        axis, spec = str(call.site.attrs["axis"]), counted(call.site.word, call.site.ins[0], call.site.outs[0])
        took = self.device.rates.collective(call.site.word, self.device.span(axis), self._bytes(spec))
        self.free[axis] = self.lands[call.outs[0]] = max(self.now, self.free.get(axis, 0.0)) + took

    def _wait(self, call: Call) -> None:
        late = self.lands.pop(call.ins[-1]) - self.now
        if late > 0:
            self.parts[DIMENSION[str(call.site.attrs["axis"])]] += late
            self.now += late

    def _compute(self, call: Call) -> None:
        key = (call.site, call.phase)
        if key not in self.device.costs:
            self.device.costs[key] = self._cost(call)
        part, took = self.device.costs[key]
        axis = max(self.free if self.lands else (), key=self.free.__getitem__, default=None)
        if axis is not None and (beside := min(took, self.free[axis] - self.now)) > 0:
            slower = beside * (self.device.rates.beside - 1)
            self.parts[DIMENSION[axis]] += slower
            self.now += slower
        self.parts[part] += took
        self.now += took

    def _cost(self, call: Call) -> tuple[Part, Seconds]:
        """Products at the speed of their shape, and all other bytes at that of memory.

        A body reads what it is given and writes what it makes; what it needs beside them it writes and reads once.
        """
        site, rates, widths = call.site, self.device.rates, self.device.widths
        body, ins = body_of(site.word, self.device.mesh.layout), shapes(call, self.device.load)
        products = body.products(call.phase, ins, site.weights, site.attrs)
        kernel = self.device.mesh.layout.attention
        if site.word == "attention" and kernel != "reference":
            flops, head = body.flops(call.phase, ins, site.weights, site.attrs), int(site.attrs["head_size"])
            return "attention", rates.attention(
                flops, backward=call.phase != "forward", causal=True, head_size=head, flash=kernel == "flash"
            )
        beside = 2 * body.workspace(call.phase, ins, site.weights, site.attrs, widths)
        if call.phase == "weight_gradient":
            beside += 2 * sum(map(prod, site.weights)) * widths["stat"]  # added to what is there
        if products:
            return "attention" if site.word == "attention" else "compute", fsum(map(rates.product, products)) + (
                rates.moved(beside) if beside else 0.0
            )
        moved = sum(self._bytes(self.specs[r]) for r in (*call.ins, *call.outs))
        return "pointwise", rates.moved(moved + beside)

    def _bytes(self, spec: Spec) -> Bytes:
        n = prod(size(d, lambda layer: self.device.load.received(layer, 0)) for d in spec.shape)
        return n * self.device.widths[spec.role]


def time_piece(piece: Piece, device: Device) -> dict[str, dict[Part, Seconds]]:
    """Seconds of a pass by action and part. Where the host needs longer to launch it, that is what counts."""
    out: dict[str, dict[Part, Seconds]] = {}
    for name, instructions in piece.chunk.actions.items():
        clock = _Clock(device, piece.chunk.specs)
        for instruction in instructions:
            clock.take(instruction.call)
        waiting = clock.calls * device.rates.launch - clock.now
        if waiting > 0:
            clock.parts["launch"] += waiting
        out[name] = clock.parts
    return out
