"""Memory of one pass of a micro-batch through a layer on a rank: kept and temporary activations, and workspace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.ops.declarations import OpDeclaration, declaration_of
from penteract.ops.declarations.quantised.fp8 import fp8_state_bytes
from penteract.ops.spec import Spec, Widths
from penteract.ops.tape import Phase, Site
from penteract.readings.layers.expert_load import Balanced, Load
from penteract.readings.layers.layer_program import LayerProgram, bytes_of, shapes
from penteract.readings.layers.reads import Memos, tracked
from penteract.step.offsets import Life, Span, aligned, lay_out
from penteract.units import Bytes

_RUNS: tuple[Phase, ...] = ("forward", "input_gradient", "weight_gradient")  # of kernels; others are collectives
Crossings = tuple[tuple[tuple[int, int], tuple[int, int], Bytes], ...]


class BorderLives(NamedTuple):
    """The lives of the registers at a layer's borders; None where it has no such neighbour."""

    input: Life | None
    output: Life | None
    output_gradient: Life | None
    input_gradient: Life | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerMemory:
    """Bytes of one pass of a micro-batch through the embedding, a layer or the head.

    `inputs`           input data that it reads
    `fp8_state_bytes`  FP8 state that its linear layers keep between steps
    `buffers`          kept bytes, by span; without the registers at its borders
    `borders`          lives of the registers at its borders
    `border_bytes`      bytes of a register at a border
    `crossing`         temporary activations that live across layers inside of it, by action: (from, to, bytes)
    `temporary`        temporary activations of one layer, by action
    `workspace`        the largest workspace of a kernel
    `routed`           kept bytes of routed size, by span; `routed_temporary`: the most at once in addition, by action
    `in_transit`       bytes being copied to or from the host, by action; `host`: bytes kept there, by span
    """

    inputs: Mapping[str, Spec]
    fp8_state_bytes: Bytes
    buffers: Mapping[Span, Bytes]
    borders: BorderLives
    border_bytes: Bytes
    crossing: Mapping[str, Crossings]
    temporary: Mapping[str, Bytes]
    workspace: Bytes
    routed: Mapping[Span, Bytes]
    routed_temporary: Mapping[str, Bytes]
    in_transit: Mapping[str, Bytes]
    host: Mapping[Span, Bytes]


@dataclass(slots=True)
class LayerMemoryReading:
    """Measures the memory of layers. Results are cached by the fields of a layout that were read (`reads.py`)."""

    model: ModelSpec
    sequence_length: int
    widths: Widths
    imbalance: float = 1.0  # of experts' rows
    memos: Memos = field(default_factory=Memos)
    workspaces: dict[tuple[OpDeclaration, Site, Phase, Load], Bytes] = field(
        default_factory=dict[tuple[OpDeclaration, Site, Phase, Load], Bytes]
    )

    @tracked
    def measure(self, layout: Layout, layer: LayerProgram) -> LayerMemory:
        """Lay out the registers of a layer in the same way as a step does."""
        outline, specs = layer.outline, layer.specs
        chunk, alive = outline.chunk, outline.lives
        load = Balanced.of(self.model, layout, self.sequence_length, self.imbalance)
        sizes_of = layer.sizes.setdefault(load, {})
        for spec in {*specs.values()} - sizes_of.keys():
            sizes_of[spec] = bytes_of(spec, self.widths, load), aligned(spec, self.widths)
        every = {r: sizes_of[spec] for r, spec in specs.items()}
        sizes = {r: n for r in alive if not specs[r].pinned and (n := every[r][1])}
        found = lay_out(chunk.actions, alive, sizes, chunk.turns)
        ends = (chunk.entry, chunk.exit, chunk.exit_gradient, chunk.entry_gradient)
        buffers, routed, temporary = dict(found.buffers), Counter[Span](), list[tuple[Life, Bytes]]()
        crossing: dict[str, list[tuple[tuple[int, int], tuple[int, int], Bytes]]] = {}
        for r, life in alive.items():
            (name, run, _), (last, last_run, _) = life
            if r in sizes:
                if name == last and run != last_run and r not in chunk.turns:
                    crossing.setdefault(name, []).append((life.born[1:], life.dies[1:], sizes[r]))
            elif name == last:
                temporary.append((life, every[r][0]))
            else:
                routed[life.span] += every[r][0]
        host = Counter[Span]()
        for r in alive if outline.copies else ():
            if specs[r].pinned:
                host[alive[r].span] += every[r][1]
        for r in {r for r in ends if r is not None}:
            buffers[alive[r].span] -= sizes.get(r, 0)
        return LayerMemory(
            inputs=layer.inputs,
            fp8_state_bytes=sum(map(fp8_state_bytes, layer.shapes.sites)),
            buffers={span: n for span, n in buffers.items() if n},
            borders=BorderLives(*(None if r is None else alive[r] for r in ends)),
            border_bytes=next((sizes[r] for r in ends if r is not None), 0),
            crossing={name: tuple(c) for name, c in crossing.items()},
            temporary={name: s.layer for name, s in found.temporary.items()},
            workspace=self._largest(layer, layout, load),
            routed=+routed, routed_temporary=_most_at_once(temporary),
            in_transit={name: s.in_transit for name, s in found.temporary.items() if s.in_transit}, host=host,
        )  # fmt: skip

    def _largest(self, layer: LayerProgram, layout: Layout, load: Load) -> Bytes:
        """The largest workspace of a kernel."""
        sites, jobs = layer.shapes.sites, [job for job in layer.outline.jobs if job[1] in _RUNS]
        return max([self._workspace(layout, sites[place], phase, load) for place, phase in jobs], default=0)

    def _workspace(self, layout: Layout, site: Site, phase: Phase, load: Load) -> Bytes:
        """It depends on the layout only by the implementation that this chooses."""
        key = (declaration_of(site, layout), site, phase, load)
        if (found := self.workspaces.get(key)) is None:
            about = (shapes(site, load, room=True), site.weights, site.attrs, self.widths)
            found = self.workspaces[key] = key[0].workspace(phase, *about)
        return found


def _most_at_once(registers: Iterable[tuple[Life, Bytes]]) -> dict[str, Bytes]:
    """The most bytes at once, by action, of registers that live within one action."""
    most: dict[str, Bytes] = {}
    changes: dict[str, list[tuple[int, int, Bytes]]] = {}
    for life, n in registers:
        changes.setdefault(life.born[0], []).extend([(life.born[2], 0, n), (life.dies[2], 1, -n)])
    for name, events in changes.items():
        now = 0
        for _, _, change in sorted(events):
            now += change
            most[name] = max(most.get(name, 0), now)
    return most
