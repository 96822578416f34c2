"""A communicator without peers: collectives and messages are reported to a witness, and complete at once.

Gathered and received buffers keep their content, all-to-alls give zeros, and sums contain this rank alone. So a whole
step can run, with meaningless numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penteract.engine.comm.comm import PeerMemory, Ranks, Round, Waitable, Work
from penteract.ops.collectives import KINDS
from penteract.schedule.actions import Payload
from penteract.step.program import Program


class CommWitness(Protocol):
    """`on_wire` is called with the kind of a collective, its `ranks`, and its bytes as `ops.collectives.payload` counts
    them. A "shift" has two ranks: its destination and its source. "send" and "recv" of `what` have one rank, the peer.
    It returns the handle to wait for.
    """

    def on_wire(self, kind: str, ranks: Ranks, amount: int, what: str = "") -> Waitable: ...


@dataclass(slots=True)
class FakeComm:
    """`Comm` of one process."""

    rank: int
    witness: CommWitness

    def open(self, p: Program) -> None: ...

    def share(self, size: int, rounds: Sequence[Round], memory: PeerMemory) -> None: ...

    def start(self, kind: str, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, attrs: Mapping[str, Any]) -> Work:
        if kind not in KINDS:
            raise ValueError(f"no collective named {kind}")
        if kind == "all_reduce":
            y.copy_(x)
        elif kind == "all_to_all":
            y.zero_()
        elif kind == "shift":
            me = ranks.index(self.rank)
            ranks = (ranks[(me + 1) % len(ranks)], ranks[me - 1])
        amount = y.nbytes if kind == "all_gather" else x.nbytes
        return Work([self.witness.on_wire(kind, ranks, amount)], (x, y))

    def start_uneven(self, ranks: Ranks, x: torch.Tensor, y: torch.Tensor, send: list[int], receive: list[int]) -> Work:
        y.zero_()
        return Work([self.witness.on_wire("all_to_all_v", ranks, x.nbytes)], (x, y))

    def sum(self, ranks: Ranks, x: torch.Tensor) -> Work | None:
        return None if len(ranks) == 1 else Work([self.witness.on_wire("all_reduce", ranks, x.nbytes)], (x,))

    largest = sum

    def finish(self, work: Work | None) -> None:
        for handle in work.waits if work is not None else ():
            handle.wait()

    def send(self, x: torch.Tensor, to: int, ranks: Ranks, what: Payload) -> Work:
        return Work([self.witness.on_wire("send", (to,), x.nbytes, what)], (x,))

    def receive(self, x: torch.Tensor, of: int, ranks: Ranks, what: Payload) -> Work:
        return Work([self.witness.on_wire("recv", (of,), x.nbytes, what)], (x,))
