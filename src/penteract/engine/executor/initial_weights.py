"""The weights that a run starts from: each parameter is a function of (seed, name) alone, so every layout starts from
the same model.

A large parameter is drawn in tiles, each by a generator of its own, and a rank draws only tiles of which it keeps
something: its rectangle, and with ZeRO 3 its shard of that. Tiles are drawn side by side on the host's cores.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod

import torch

from penteract.engine.device.cpu_affinity import usable_here
from penteract.engine.device.device import device_of
from penteract.engine.state.state import TrainingState, fill
from penteract.ops.params import Param
from penteract.step.program import Program

TILE = (1024, 512)  # rows and columns; parameters of fewer elements are one tile
FEW = 2**24  # elements of this rank: so many are drawn before threads have started
MOST = 8  # threads
# Elements that are drawn before they are copied to where they belong, in fp32. torch page-locks a power of two.
AHEAD = 2**28

CPU = torch.device("cpu")

Span = tuple[int, int]  # begin and end


def initialise(p: Program, state: TrainingState, seed: int) -> None:
    """Fill parameters, and their master weights."""
    kept = kept_elements(p, state)
    few = sum(n - at for at, n in kept.values()) < FEW
    device = device_of(state.routed.device)
    room = min(AHEAD, sum(q.numel(p.mesh) for q in p.params))
    with device.staging_memory(room, pinned=not few) as block:
        fill(state, drawn(p, seed, kept, threads=1 if few else threads_here(), staging=Staging(block)))


def threads_here() -> int:
    """Threads that draw: this rank's part of the host's cores."""
    return max(1, min(MOST, usable_here() // max(1, torch.cuda.device_count())))


def kept_elements(p: Program, state: TrainingState) -> dict[str, Span]:
    """The elements of each parameter's rectangle, in row-major order, that this rank keeps: all of them, or its
    shard's; (0, 0) if it keeps none."""
    cut = {q.name for flat in state.flats if flat.cut_parameter is not None for q in flat.bucket.params}
    shards = {
        part.param.name: (part.begin, part.begin + len(part.values)) for part in state.parameter_parts("parameter")
    }
    return {q.name: shards.get(q.name, (0, 0)) if q.name in cut else (0, q.numel(p.mesh)) for q in p.params}


@dataclass(slots=True)
class Staging:
    """Host memory [n], fp32, that rectangles have in turn. Memory that is new to a process takes longer to touch than
    numbers to draw, and a GPU copies from page-locked memory many times faster.

    in_use  begin and end of the rectangles that are not copied yet, the oldest first
    at      behind the youngest
    """

    block: torch.Tensor
    in_use: deque[Span] = field(default_factory=deque[Span])
    at: int = 0

    def take(self, elements: int) -> torch.Tensor | None:
        """Memory for a rectangle, of its own if it is larger than all; None as long as older ones are in the way."""
        if elements > len(self.block):
            if self.in_use:
                return None
            self.in_use.append((0, 0))
            return torch.empty(elements, device=self.block.device)
        begin = self.at if self.at + elements <= len(self.block) else 0
        if any(low < begin + elements and begin < high for low, high in self.in_use):
            return None
        self.at = begin + elements
        self.in_use.append((begin, self.at))
        return self.block[begin : self.at]

    def give_back(self) -> None:
        """The oldest rectangle is copied."""
        self.in_use.popleft()


def drawn(
    p: Program, seed: int, kept: dict[str, Span], *, threads: int, staging: Staging
) -> Iterator[tuple[Param, torch.Tensor]]:
    """The parameters of a rank in their order, each with its rectangle, which holds numbers where they are kept, until
    the next is asked for."""
    waiting = deque[tuple[Param, torch.Tensor, list[Future[None]]]]()
    with ThreadPoolExecutor(threads) as pool:
        for q in p.params:
            shape = q.local_shape(p.mesh)
            while (memory := staging.take(prod(shape))) is None:
                yield _first(waiting)
                staging.give_back()
            rectangle = memory.view(shape)
            waiting.append((q, rectangle, [pool.submit(work) for work in tasks(p, q, seed, kept[q.name], rectangle)]))
        while waiting:
            yield _first(waiting)
            staging.give_back()


def _first(waiting: deque[tuple[Param, torch.Tensor, list[Future[None]]]]) -> tuple[Param, torch.Tensor]:
    q, rectangle, pending = waiting.popleft()
    for each in pending:
        each.result()
    return q, rectangle


def tasks(p: Program, q: Param, seed: int, kept: Span, rectangle: torch.Tensor) -> Iterator[Callable[[], None]]:
    """What fills the kept elements of this rank's rectangle of a parameter."""
    if kept[0] == kept[1] or rectangle.is_meta:
        return
    if q.scale is None:
        yield lambda: _set(rectangle, q.fill)
        return
    rows = rectangle.view(-1, rectangle.shape[-1])
    for tile in tiles(q.shape, q.offset(p.mesh, p.rank), rectangle.shape, kept):
        yield lambda tile=tile: tile.draw(seed, q, rows)


def _set(rectangle: torch.Tensor, fill: float) -> None:
    rectangle.fill_(fill)


Place = tuple[slice, slice]  # rows and columns


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a parameter [rows, columns]; its leading dims are rows.

    name    behind that of the parameter; empty if it is the whole parameter
    places  what of it is kept, and where that lies in the rank's rectangle
    """

    name: str
    size: tuple[int, int]
    places: list[tuple[Place, Place]] = field(default_factory=list[tuple[Place, Place]])

    def draw(self, seed: int, q: Param, rectangle: torch.Tensor) -> None:
        """Draw it, and put what is kept into the rectangle [rows, columns]."""
        digest = hashlib.sha256(f"{seed}/{q.name}{self.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        numbers = torch.randn(self.size, generator=generator, out=_scratch(self.size))
        for inside, into in self.places:
            torch.mul(numbers[inside], q.scale or 0.0, out=rectangle[into])


_threads = threading.local()


def _scratch(size: tuple[int, int]) -> torch.Tensor:
    """Memory [rows, columns] of this thread, for one tile after the other."""
    elements = size[0] * size[1]
    block = getattr(_threads, "block", None)
    if block is None or len(block) < elements:
        block = _threads.block = torch.empty(elements)
    return block[:elements].view(size)


def tiles(shape: Sequence[int], offset: Sequence[int], local: Sequence[int], kept: Span) -> Iterable[Tile]:
    """The tiles of a parameter of this `shape` that hold something of the elements `kept` of a rectangle: it begins at
    `offset` and has the shape `local`."""
    rows, columns = prod(shape[:-1]), shape[-1]
    whole = rows * columns <= prod(TILE)
    high, wide = (rows, columns) if whole else TILE
    found = dict[tuple[int, int], Tile]()
    first, last = kept[0] // local[-1], -(-kept[1] // local[-1])  # rows of the rectangle
    for at, begin, end in _runs(shape[:-1], offset[:-1], local[:-1]):
        low, top = max(first, at), min(last, at + end - begin)
        for i, of_tile, of_rows in _overlaps((begin + low - at, begin + top - at), high):
            for j, across, of_columns in _overlaps((offset[-1], offset[-1] + local[-1]), wide):
                if (i, j) not in found:
                    size = min(high, rows - i * high), min(wide, columns - j * wide)
                    found[i, j] = Tile("" if whole else f"/{i}/{j}", size)
                into = slice(of_rows.start + low, of_rows.stop + low), of_columns
                found[i, j].places.append(((of_tile, across), into))
    return found.values()


def _runs(shape: Sequence[int], offset: Sequence[int], local: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The rows of a rectangle that are neighbours in the parameter, [begin, end), and the first of them in the
    rectangle. Its leading dims are (experts, rows), rows, or none."""
    *outer, inner = (1, 1, *shape)[-2:]
    begins, counts = (0, 0, *offset)[-2:], (1, 1, *local)[-2:]
    assert len(outer) == 1 and prod(shape) == outer[0] * inner
    for i in range(counts[0]):
        begin = (begins[0] + i) * inner + begins[1]
        yield i * counts[1], begin, begin + counts[1]


def _overlaps(span: Span, step: int) -> Iterator[tuple[int, slice, slice]]:
    """The multiples of `step` in which a span lies: number, what of it is in the span, and where that is in the
    span."""
    begin, end = span
    for i in range(begin // step, -(-end // step) if begin < end else begin // step):
        low, top = max(begin, i * step), min(end, (i + 1) * step)
        yield i, slice(low - i * step, top - i * step), slice(low - begin, top - begin)
