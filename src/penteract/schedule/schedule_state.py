"""Checks one rank's list by itself: every action is there once, and after what it needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NoReturn

from penteract.errors import Bug
from penteract.schedule.actions import Compute, Overlapped, P2PBatch, Payload, Transfer, computes
from penteract.schedule.schedule import Placement

Fact = tuple[str, int, int]  # (what happened, micro, chunk)


@dataclass(frozen=True, slots=True)
class Message:
    """A message, described in the same way on both of its ranks; stages are global."""

    what: Payload
    micro: int
    source: int
    target: int

    def __str__(self) -> str:
        """Reads as `value 3 of stage 0 for stage 1`."""
        return f"{self.what} {self.micro} of stage {self.source} for stage {self.target}"


def message_of(transfer: Transfer, rank: int, placement: Placement) -> Message:
    """The message of `transfer` on `rank`: its payload, and from which stage to which."""
    source = source_of(transfer, rank, placement)
    return Message(transfer.what, transfer.micro, source, source + (1 if transfer.what == "value" else -1))


def source_of(transfer: Transfer, rank: int, placement: Placement) -> int:
    """The stage from which a message of `rank` comes: a value goes to the next stage, a gradient to the previous."""
    here = placement.stages[rank][transfer.chunk]
    return here if transfer.kind == "Send" else here - (1 if transfer.what == "value" else -1)


@dataclass(slots=True)
class ScheduleState:
    """What one rank has done so far, and the peaks of what it keeps."""

    rank: int
    placement: Placement
    num_micro_batches: int
    facts: set[Fact] = field(default_factory=set[Fact])
    kept: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])  # activations alive, (micro, chunk)
    received: set[Fact] = field(default_factory=set[Fact])  # messages that wait for their consumer
    kept_peak: int = 0
    received_peak: int = 0

    def step(self, action: Compute | Overlapped | P2PBatch) -> None:
        """Do one action. Its parts run together: each sees only the state before all of them."""
        parts = action.transfers if isinstance(action, P2PBatch) else computes(action)
        for part in parts:
            self._require(part)
        self._require_copies([t for t in parts if isinstance(t, Transfer) and t.peer == self.rank])
        for part in parts:
            self._record(part)
        self.kept_peak = max(self.kept_peak, len(self.kept))
        self.received_peak = max(self.received_peak, len(self.received))
        for part in parts:
            self._release(part)

    def finish(self) -> None:
        """Raise Bug if a required action is missing."""
        for chunk in range(self.placement.vpp):
            for micro in range(self.num_micro_batches):
                backward = ["Inp", "Wgt"] if ("Inp", micro, chunk) in self.facts else ["Bwd"]
                for name in ["Fwd", *backward, *self._messages(chunk)]:
                    if (name, micro, chunk) not in self.facts:
                        self._fault(f"{name} is missing for micro-batch {micro}, chunk {chunk}")

    def _messages(self, chunk: int) -> list[str]:
        stage, names = self.placement.stages[self.rank][chunk], list[str]()
        if stage > 0:
            names += ["Recv value", "Send gradient"]
        if stage < len(self.placement.locations) - 1:
            names += ["Send value", "Recv gradient"]
        return names

    def _require(self, part: Compute | Transfer) -> None:
        micro, chunk, name = part.micro, part.chunk, _name(part)
        vpp = self.placement.vpp
        if not (0 <= micro < self.num_micro_batches and 0 <= chunk < vpp):
            self._fault(f"{part} is outside {self.num_micro_batches} micro-batches and {vpp} chunks")
        if isinstance(part, Transfer):
            self._require_peer(part)
        again = {"Bwd": ("Bwd", "Inp"), "Inp": ("Inp", "Bwd")}.get(name, (name,))
        if any((n, micro, chunk) in self.facts for n in again):
            self._fault(f"{part} comes twice")
        for need in self._needs(part):
            if not any((n, micro, chunk) in self.facts for n in need.split(" or ")):
                self._fault(f"{part} comes before {need}")

    def _require_peer(self, transfer: Transfer) -> None:
        message, locations = message_of(transfer, self.rank, self.placement), self.placement.locations
        other = message.target if transfer.kind == "Send" else message.source
        if not 0 <= other < len(locations):
            self._fault(f"{transfer} leaves the pipeline")
        if transfer.peer != locations[other][0]:
            self._fault(f"{transfer} names the wrong rank, stage {other} is on rank {locations[other][0]}")

    def _require_copies(self, own: list[Transfer]) -> None:
        """Check that the send and the receive of a message within this rank are adjacent."""
        for send, receive in zip_longest(own[::2], own[1::2]):
            both = [message_of(t, self.rank, self.placement) for t in (send, receive or send)]
            if both[0] != both[1] or receive is None or (send.kind, receive.kind) != ("Send", "Recv"):
                self._fault(f"{send} is not next to its receive")

    def _needs(self, part: Compute | Transfer) -> list[str]:
        names = self._messages(part.chunk)
        match _name(part):
            case "Fwd":
                return [n for n in names if n == "Recv value"]
            case "Bwd" | "Inp":
                return ["Fwd", *(n for n in names if n == "Recv gradient")]
            case "Wgt":
                return ["Inp"]
            case "Send value":
                return ["Fwd"]
            case "Send gradient":
                return ["Bwd or Inp"]
            case _:
                return []

    def _record(self, part: Compute | Transfer) -> None:
        fact = (_name(part), part.micro, part.chunk)
        self.facts.add(fact)
        if fact[0] == "Fwd":
            self.kept.add(fact[1:])
        elif fact[0].startswith("Recv"):
            self.received.add(fact)

    def _release(self, part: Compute | Transfer) -> None:
        match _name(part):
            case "Fwd":
                self.received.discard(("Recv value", part.micro, part.chunk))
            case "Bwd" | "Inp" as name:
                self.received.discard(("Recv gradient", part.micro, part.chunk))
                if name == "Bwd":
                    self.kept.discard((part.micro, part.chunk))
            case "Wgt":
                self.kept.discard((part.micro, part.chunk))
            case _:
                pass

    def _fault(self, what: str) -> NoReturn:
        raise Bug("SCHEDULE", what, where=f"rank {self.rank}")


def _name(part: Compute | Transfer) -> str:
    return part.kind if isinstance(part, Compute) else f"{part.kind} {part.what}"
