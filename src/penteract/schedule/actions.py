"""The actions of a pipeline rank: compute a chunk, or post a batch of sends and receives (P2P). Schedules are lists of
actions."""

from __future__ import annotations

from typing import Literal, NamedTuple

ComputeKind = Literal["Fwd", "Bwd", "Inp", "Wgt"]
Payload = Literal["value", "gradient"]


class Compute(NamedTuple):
    """Walk one chunk for one micro-batch.

    `Bwd` is the input and weight gradients together; `Inp` then `Wgt` is the same work split, so that the previous
    stage need not wait for the second half. `chunk` counts from 0 on its rank (see `Placement`).
    """

    kind: ComputeKind
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        """Kind, micro-batch and chunk: `F3`, or `F3.1` if the chunk is not the first."""
        return f"{self.kind[0]}{_name(self.micro, self.chunk)}"


class Overlapped(NamedTuple):
    """The backward of one micro-batch and the forward of another, walked together, instruction by instruction."""

    backward: Compute
    forward: Compute

    def __str__(self) -> str:
        """Both passes, the backward one first: `B0|F3`."""
        return f"{self.backward}|{self.forward}"


class Transfer(NamedTuple):
    """This rank's side of one message between neighbouring stages.

    `chunk` is the chunk of this rank that produces (Send) or consumes (Recv) the message. `peer` is the pipeline
    coordinate of the other rank; if both stages are on this rank, it is this rank, and the message is a copy within one
    P2P batch. A value goes to the next stage, a gradient to the previous one.
    """

    kind: Literal["Send", "Recv"]
    what: Payload
    micro: int
    chunk: int
    peer: int

    def __str__(self) -> str:
        """Reads as `Send value 3 to rank 1`."""
        way = "to" if self.kind == "Send" else "from"
        return f"{self.kind} {self.what} {_name(self.micro, self.chunk)} {way} rank {self.peer}"


class P2PBatch(NamedTuple):
    """Transfers posted together, in this order. In the proof the rank continues when all of them are done. A run waits
    for a received value when it reads it, and for its sends before the next P2P batch."""

    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        """Its transfers in their order, in brackets."""
        return f"[{', '.join(map(str, self.transfers))}]"


ComputeList = list[Compute | Overlapped]
ActionList = list[Compute | Overlapped | P2PBatch]


def computes(action: Compute | Overlapped | P2PBatch) -> tuple[Compute, ...]:
    """The chunk walks inside an action: one, two when overlapped, none in a P2P batch."""
    match action:
        case Compute():
            return (action,)
        case Overlapped():
            return (action.backward, action.forward)
        case P2PBatch():
            return ()


def _name(micro: int, chunk: int) -> str:
    return f"{micro}.{chunk}" if chunk else str(micro)
