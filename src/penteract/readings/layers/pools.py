"""The activation buffers of a pipeline rank: the size of each pool's buffers, and which chunks and spans use them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penteract.config.layout import Layout
from penteract.readings.layers.stages import StageSum
from penteract.schedule.in_flight import most_in_flight
from penteract.step.arena import Pool, share_buffers
from penteract.step.offsets import Span
from penteract.units import Bytes

Members = tuple[tuple[int, Span], ...]  # (chunk, span) that share one pool


@dataclass(frozen=True, slots=True)
class Pools:
    """Activations of a rank: temporary ones, and a buffer of each pool for every micro-batch in flight.

    `routed`: registers of routed size, which have their own storage. Their sum is an upper bound.
    """

    temporary: Bytes
    buffers: tuple[tuple[Bytes, Members], ...]
    routed_temporary: Bytes
    routed: tuple[tuple[Bytes, Members], ...]
    host: tuple[tuple[Bytes, Members], ...]

    @staticmethod
    def of(stages: Sequence[StageSum]) -> Pools:
        """The pools of a rank's chunks, of which equal ones are one object. A single chunk shares no buffers."""
        if len(stages) == 1:
            [s] = stages
            buffers, routed, host = (
                tuple([(n, ((0, span),)) for span, n in own.items()]) for own in (s.buffers, s.routed, s.host)
            )
            return Pools(s.temporary, buffers, s.routed_temporary, routed, host)
        chunks: dict[int, list[int]] = {}  # of equal stages, by identity
        for c, s in enumerate(stages):
            chunks.setdefault(id(s), []).append(c)
        places = list(chunks.values())
        kinds = [stages[own[0]] for own in places]
        return Pools(
            temporary=max([s.temporary for s in kinds]),
            buffers=_shared([s.buffers for s in kinds], places),
            routed_temporary=max([s.routed_temporary for s in kinds]),
            routed=tuple([(size, ((c, span),)) for c, s in enumerate(stages) for span, size in s.routed.items()]),
            host=_shared([s.host for s in kinds], places),
        )

    def activations(self, layout: Layout, ranks: Sequence[int]) -> Iterable[tuple[Bytes, Bytes]]:
        """Bytes of the arena and of routed registers, on each of the pipeline `ranks` with these stages. They differ
        only by the schedule."""
        return zip(
            _held(self.temporary, self.buffers, layout, ranks),
            _held(self.routed_temporary, self.routed, layout, ranks),
            strict=True,
        )

    def pinned(self, layout: Layout, ranks: Sequence[int]) -> list[Bytes]:
        """Bytes on the host, on each of the pipeline `ranks`."""
        return _held(0, self.host, layout, ranks)


def _shared(buffers: Sequence[Mapping[Span, Bytes]], places: Sequence[list[int]]) -> tuple[tuple[Bytes, Members], ...]:
    """Bytes of each pool's buffers, and which (chunk, span) use it. `buffers`: of each distinct stage; `places`: its
    chunks."""
    pool, block = share_buffers(buffers)
    members: dict[Pool, list[tuple[int, Span]]] = {}
    for (kind, span), shared in pool.items():
        members.setdefault(shared, []).extend([(c, span) for c in places[kind]])
    return tuple([(block[shared], tuple(some)) for shared, some in members.items()])


def _held(always: Bytes, buffers: Iterable[tuple[Bytes, Members]], layout: Layout, ranks: Sequence[int]) -> list[Bytes]:
    lay, total = layout, [always] * len(ranks)
    for size, members in buffers:
        counts = most_in_flight(lay.schedule, lay.pp, lay.vpp, lay.gradient_accumulation_steps, members)
        total = [n + size * counts[r] for n, r in zip(total, ranks, strict=True)]
    return total
