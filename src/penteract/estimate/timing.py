"""How long a pass takes: the instructions of a piece on the device's one stream and its wires, as the tape puts them.

A collective runs from its `start` while its wire is free; compute waits for it at its `finish`, and no sooner. What is
waited for is exposed; nothing else says how much of the traffic is hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import fsum, lcm, prod
from typing import NamedTuple

from penteract.estimate.load import Load
from penteract.estimate.outline import Doing
from penteract.estimate.pieces import Piece, bytes_of, shapes
from penteract.estimate.rates import Rates, Span
from penteract.estimate.reads import Memo
from penteract.ops.bodies import body_of
from penteract.ops.bodies.body import FLOAT, Body, Product
from penteract.ops.collectives import counted
from penteract.ops.offload import COPIES
from penteract.ops.spec import Spec, Widths
from penteract.ops.tape import Phase, Site
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.units import Bytes, Seconds

Part = str  # compute, attention, pointwise, launch, or the dimension whose traffic is waited for
DIMENSION: Mapping[str, Part] = {"tp": "tensor", "cp": "context", "ep": "expert", "sequence": "expert"}


@dataclass(frozen=True, slots=True)
class Device:
    """What a pass runs on: rates, the width of a node, and the spread of a rank's groups over nodes.

    costs   of calls that other pieces share
    spans   of axes
    """

    rates: Rates
    widths: Widths
    mesh: Mesh
    gpus_per_node: int
    load: Load
    costs: Memo[tuple[Part, Seconds]]
    spans: Memo[Span]

    def under(self, layout: Layout) -> Device:
        """The same with another view of the layout."""
        return Device(self.rates, self.widths, Mesh(layout), self.gpus_per_node, self.load, self.costs, self.spans)

    def span(self, axis: str) -> Span:
        """Of the group that lies worst. Where blocks of ranks and nodes do not divide, groups lie differently."""
        return self.spans.ask(self.mesh.layout, axis, self._span, axis)

    def _span(self, axis: str, layout: Layout) -> Span:
        mesh, node = Mesh(layout), self.gpus_per_node
        block, _ = mesh.block(axis)
        aligned = block % node == 0 or node % block == 0
        ranks = (0,) if aligned else range(min(layout.world, lcm(block, node)))
        return max((Span.of(mesh.group(axis, r), node) for r in ranks), key=lambda s: s.nodes)

    def bytes_of(self, spec: Spec) -> Bytes:
        return bytes_of(spec, self.widths, self.load)


_Cost = tuple[str, Seconds]  # of a call: its part, its copy's word, or its collective's axis; and how long it takes


@dataclass(slots=True)
class _Clock:
    """One pass under way. `known`: what the calls of each job cost, as far as they were met; `agreed`: and what it
    takes to ask other ranks first."""

    device: Device
    piece: Piece
    known: list[_Cost | None]
    agreed: dict[int, tuple[str, Seconds]] = field(default_factory=dict[int, tuple[str, Seconds]])
    now: Seconds = 0.0
    parts: dict[Part, Seconds] = field(default_factory=lambda: defaultdict[Part, Seconds](float))
    free: dict[str, Seconds] = field(default_factory=dict[str, Seconds])  # when each axis's wire is
    copies: Seconds = 0.0  # to or from the host: who waits for them is known of a whole stage (`link.py`)
    lands: dict[int, Seconds] = field(default_factory=dict[int, Seconds])  # register -> when its collective is done

    def play(self, calls: Iterable[Doing]) -> None:
        jobs, known, lands, parts = self.piece.outline.jobs, self.known, self.lands, self.parts
        for job, ins, outs in calls:
            name, took = known[job] or self._ask(job, (*ins, *outs))
            phase = jobs[job][1]
            if name in COPIES:
                self.copies += took if phase == "start" else 0.0
            elif phase == "start":
                self.free[name] = lands[outs[0]] = max(self.now, self.free.get(name, 0.0)) + took
            elif phase == "finish":
                self._wait(name, lands.pop(ins[-1]))
            else:
                if job in self.agreed:
                    self._agree(*self.agreed[job])
                if lands:
                    self._beside(took)
                parts[name] += took
                self.now += took

    def _wait(self, axis: str, until: Seconds) -> None:
        late = until - self.now
        if late > 0:
            self.parts[DIMENSION[axis]] += late
            self.now += late

    def _agree(self, axis: str, took: Seconds) -> None:
        """A body asks the ranks of an axis, and waits for what they answer."""
        self.parts["tensor" if axis == "sequence" else DIMENSION[axis]] += took
        self.now += took

    def _beside(self, took: Seconds) -> None:
        """Compute is slower while the wire that is busy longest is."""
        axis = max(self.free, key=self.free.__getitem__)
        if (beside := min(took, self.free[axis] - self.now)) > 0:
            slower = beside * (self.device.rates.beside - 1)
            self.parts[DIMENSION[axis]] += slower
            self.now += slower

    def _ask(self, job: int, registers: tuple[int, ...]) -> _Cost:
        place, phase = self.piece.outline.jobs[job]
        site, device = self.piece.sites[place], self.device
        key = (site, phase, device.load)
        cost = device.costs.ask(device.mesh.layout, key, _asked, device, self.piece, site, phase, registers)
        self.known[job] = cost
        self._ask_agreement(job, site, phase)
        return cost

    def _ask_agreement(self, job: int, site: Site, phase: Phase) -> None:
        if "fp8" in site.attrs and phase not in ("start", "finish"):  # no other word's ranks agree on anything
            body, ins = body_of(site, self.device.mesh.layout), shapes(site, self.device.load)
            axis, n = body.agreed(phase, ins, site.weights, site.attrs)
            if n and self.device.mesh.size(axis) > 1:
                took = self.device.rates.collective("all_reduce", self.device.span(axis), n * FLOAT)
                self.agreed[job] = (axis, took)


def _asked(device: Device, piece: Piece, site: Site, phase: Phase, registers: tuple[int, ...], layout: Layout) -> _Cost:
    """As the layout shows it. Few sites look at it: their groups' spans, and the kernels of attention and FP8."""
    if phase in ("start", "finish"):
        return _wire(device.under(layout), site)
    return _cost(device, piece, site, phase, registers, layout)


def _wire(device: Device, site: Site) -> _Cost:
    if site.word in COPIES:
        amount = device.bytes_of(site.ins[0]._replace(pinned=False))
        return site.word, device.rates.copy(site.word, amount)
    axis, spec = str(site.attrs["axis"]), counted(site.word, site.ins[0], site.outs[0])
    return axis, device.rates.collective(site.word, device.span(axis), device.bytes_of(spec))


def _cost(device: Device, piece: Piece, site: Site, phase: Phase, registers: tuple[int, ...], layout: Layout) -> _Cost:
    """Products at the speed of their shape, and all other bytes at that of memory.

    A body reads what it is given and writes what it makes; what it needs beside them it writes and reads once.
    """
    rates, body, ins = device.rates, body_of(site, layout), shapes(site, device.load)
    if site.word == "attention" and layout.attention != "reference":
        flops, head = body.flops(phase, ins, site.weights, site.attrs), int(site.attrs["head_size"])
        backward, flash = phase != "forward", layout.attention == "flash"
        return "attention", rates.attention(flops, backward=backward, causal=True, head_size=head, flash=flash)
    products = body.products(phase, ins, site.weights, site.attrs)
    if body.of_codes(phase):
        return "compute", _scaled(device, body, site, phase, ins, products)
    beside = 2 * body.workspace(phase, ins, site.weights, site.attrs, device.widths)
    if phase == "weight_gradient":
        beside += 2 * sum(map(prod, site.weights)) * device.widths["gradient"]  # added to what is there
    if products:
        return "attention" if site.word == "attention" else "compute", fsum(map(rates.product, products)) + (
            rates.moved(beside) if beside else 0.0
        )
    specs = piece.specs
    moved = sum([device.bytes_of(specs[r]) for r in registers])
    moved += sum([device.bytes_of(specs[registers[i]]) for i in body.overwrites])
    return "pointwise", rates.moved(moved + beside)


def _scaled(
    device: Device, body: Body, site: Site, phase: Phase, ins: list[tuple[int, ...]], products: tuple[Product, ...]
) -> Seconds:
    """Products of codes, and the passes that make codes. A weight gradient is made beside its bucket."""
    rates, widths = device.rates, device.widths
    passes = body.passes(phase, ins, site.weights, widths)
    if phase == "weight_gradient":
        passes += 2 * prod(site.weights[0]) * (widths["gradient"] + widths["compute"])
    return fsum(map(rates.scaled, products)) + rates.moved(passes)


def seconds_alone(piece: Piece, device: Device) -> dict[int, Seconds]:
    """Of each call of a forward, by the place of its site: as if nothing else ran, collectives too."""
    found = dict[int, Seconds]()
    for job, ins, outs in piece.outline.calls["Fwd"]:
        place, phase = piece.outline.jobs[job]
        site = piece.sites[place]
        if phase == "forward":
            found[place] = _cost(device, piece, site, phase, (*ins, *outs), device.mesh.layout)[1]
        elif phase == "start" and site.word not in COPIES:
            amount = device.bytes_of(counted(site.word, site.ins[0], site.outs[0]))
            found[place] = device.rates.collective(site.word, device.span(str(site.attrs["axis"])), amount)
    return found


class Timed(NamedTuple):
    """A pass through a piece by action: seconds of its parts, and of all of them; those of its copies beside them."""

    parts: Mapping[str, Mapping[Part, Seconds]]
    seconds: Mapping[str, Seconds]
    copies: Mapping[str, Seconds]


def time_piece(piece: Piece, device: Device) -> Timed:
    """Play a piece's calls. Where the host needs longer to launch them, that is what counts."""
    parts: dict[str, Mapping[Part, Seconds]] = {}
    known: list[_Cost | None] = [None] * len(piece.outline.jobs)
    agreed: dict[int, tuple[str, Seconds]] = {}
    copies: dict[str, Seconds] = {}
    for name, calls in piece.outline.calls.items():
        clock = _Clock(device, piece, known, agreed)
        clock.play(calls)
        waiting = len(calls) * device.rates.launch - clock.now
        if waiting > 0:
            clock.parts["launch"] += waiting
        parts[name] = clock.parts
        if clock.copies:
            copies[name] = clock.copies
    return Timed(parts, {name: fsum(told.values()) for name, told in parts.items()}, copies)
