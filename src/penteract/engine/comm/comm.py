"""Collectives and transfers on torch.distributed: `start` puts one on the wire, `finish` waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from penteract.engine import compat
from penteract.engine.comm.groups import Groups, Ranks


@dataclass(slots=True)
class Flight:
    """A collective under way. It pins its buffers; `landed` is the wire's own where the result needs reordering."""

    works: list[Any]
    pinned: tuple[torch.Tensor, ...]
    landed: torch.Tensor | None = None
    concat: int = 0


@dataclass(slots=True)
class Comm:
    """One rank's lines to the others."""

    groups: Groups
    rank: int
    sends: list[Flight] = field(default_factory=list[Flight])  # of the pipeline, not yet waited for

    def start(self, kind: str, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, attrs: Mapping[str, Any]) -> Flight:
        """Begin `kind` from x into y."""
        group = self.groups[ranks]
        match kind:
            case "all_gather":
                return Flight([compat.all_gather(y, x, group)], (x, y))
            case "reduce_scatter":
                return Flight([compat.reduce_scatter(y, x, group)], (x, y))
            case "all_reduce":
                y.copy_(x)
                op = dist.ReduceOp.MAX if attrs.get("reduce") == "max" else dist.ReduceOp.SUM
                return Flight([dist.all_reduce(y, op, group=group, async_op=True)], (y,))
            case "all_to_all":
                return _all_to_all(group, len(ranks), x, y, attrs["split"], attrs["concat"])
            case "shift":
                return self._shift(group, ranks, x, y)
            case _:
                raise ValueError(f"no collective named {kind}")

    def start_uneven(
        self, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, send: list[int], receive: list[int]
    ) -> Flight:
        """All-to-all of rows: `send[i]` of x to the group's rank i, `receive[i]` from it."""
        work = dist.all_to_all_single(y, x, receive, send, group=self.groups[ranks], async_op=True)
        return Flight([work], (x, y))

    def sum(self, ranks: Ranks, x: torch.Tensor) -> Flight | None:
        """Sum x over `ranks`, in place."""
        if len(ranks) == 1:
            return None
        return Flight([dist.all_reduce(x, group=self.groups[ranks], async_op=True)], (x,))

    def largest(self, ranks: Ranks, x: torch.Tensor) -> Flight | None:
        """The largest of each number of x over `ranks`, in place."""
        if len(ranks) == 1:
            return None
        return Flight([dist.all_reduce(x, dist.ReduceOp.MAX, group=self.groups[ranks], async_op=True)], (x,))

    def finish(self, flight: Flight | None, y: torch.Tensor | None = None) -> None:
        """Wait (on a GPU: let the stream wait), and put what landed in its order into y."""
        if flight is None:
            return
        for work in flight.works:
            work.wait()
        if flight.landed is not None and y is not None:
            torch.cat(flight.landed.unbind(0), dim=flight.concat, out=y)

    def exchange(
        self, sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]], ranks: Ranks
    ) -> None:
        """Post all transfers together; return when what is received is there. `finish_sends` waits for the rest."""
        group = self.groups[ranks]
        ops = [dist.P2POp(dist.isend, x, to, group) for x, to in sends]
        ops += [dist.P2POp(dist.irecv, x, of, group) for x, of in receives]
        works: list[Any] = dist.batch_isend_irecv(ops)
        if len(works) == len(ops):
            for work in works[len(sends) :]:
                work.wait()
            self.sends.append(Flight(works[: len(sends)], tuple(x for x, _ in sends)))
        else:  # one handle for the whole batch
            for work in works:
                work.wait()

    def finish_sends(self) -> None:
        for flight in self.sends:
            self.finish(flight)
        self.sends.clear()

    def connect(self, ranks: Ranks, x: torch.Tensor) -> None:
        """On GPUs: set up the lines to both neighbours of a ring, for transfers like x, as all of `ranks` do it now.

        A first send or receive makes its host wait for the other side's; schedules are proven for posts that do not.
        """
        if len(ranks) > 1 and x.device.type == "cuda":
            for ring in (ranks, ranks[::-1]):
                self.finish(self._shift(self.groups[ranks], ring, x, torch.empty_like(x)))
            torch.cuda.synchronize()

    def _shift(self, group: Any, ring: Ranks, x: torch.Tensor, y: torch.Tensor) -> Flight:
        """x to the next of the ring, y from the one before."""
        me = ring.index(self.rank)
        ops = [
            dist.P2POp(dist.isend, x, ring[(me + 1) % len(ring)], group),
            dist.P2POp(dist.irecv, y, ring[me - 1], group),
        ]
        return Flight(dist.batch_isend_irecv(ops), (x, y))


def _all_to_all(group: Any, n: int, x: torch.Tensor, y: torch.Tensor, split: int, concat: int) -> Flight:
    """Piece i of dim `split` goes to rank i; what comes is joined along `concat`."""
    pieces = x.unflatten(split, (n, -1)).movedim(split, 0).contiguous()
    if concat == 0:
        landed = y.view(pieces.shape)
        return Flight([dist.all_to_all_single(landed, pieces, group=group, async_op=True)], (pieces, y))
    landed = torch.empty_like(pieces)
    work = dist.all_to_all_single(landed, pieces, group=group, async_op=True)
    return Flight([work], (pieces, y), landed, concat)
