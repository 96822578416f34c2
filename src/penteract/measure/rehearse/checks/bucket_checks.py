"""Is a bucket of parameters whole when it is read, and are its gradients summed when they are used?

Nothing here knows the rule by which a program gathers and reduces. A bucket is memory that holds something or does not:
reading, writing and overwriting it must make sense for whoever holds what, whatever the ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from penteract.engine.state.state import Flat
from penteract.measure.rehearse.findings import Findings

Place = tuple[int, int, int]  # storage, begin and end in bytes


def place(x: torch.Tensor) -> Place:
    """Where a contiguous tensor lies."""
    at = int(x.storage_offset()) * x.element_size()
    return x.untyped_storage()._cdata, at, at + x.nbytes


def overlap(a: Place, b: Place) -> bool:
    """Whether two places share a byte."""
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


@dataclass(slots=True)
class Held:
    """What the buffers of a bucket hold.

    whole      all parameters are there
    coming     their all-gather is under way
    room       the gradients' buffer is this bucket's
    written    it has gradients that no collective has summed
    summing    a collective of them is under way, in the bucket's buffer; `sharing`: one of the shard's own
    scattered  their reduce-scatter has not been followed by the sum over replicas
    summed     sums of this step that nothing was added to since
    """

    whole: bool
    room: bool
    coming: bool = False
    written: bool = False
    summing: bool = False
    sharing: bool = False
    scattered: bool = False
    summed: bool = False


@dataclass(slots=True)
class BucketChecks:
    """Follows the buckets of one rank through a step."""

    flats: Sequence[Flat]
    findings: Findings
    held: list[Held] = field(init=False)
    of: dict[str, int] = field(init=False)  # parameter -> bucket
    _parameters: list[Place] = field(init=False)
    _gradients: list[Place] = field(init=False)

    def __post_init__(self) -> None:
        """Before the first step what is not sharded is whole."""
        buckets = [flat.bucket for flat in self.flats]
        self.held = [Held(not b.cut_parameters, not b.cut_gradients) for b in buckets]
        self.of = {q.name: i for i, b in enumerate(buckets) for q in b.params}
        self._parameters = [place(flat.parameter) for flat in self.flats]
        self._gradients = [place(flat.gradient) for flat in self.flats]

    def name(self, b: int) -> str:
        """A bucket as text."""
        first, *others = self.flats[b].bucket.params
        more = f" and {len(others)} more" if others else ""
        return f"bucket {b} ({first.name}{more})"

    def read(self, names: Sequence[str], by: str) -> None:
        """A call reads parameters."""
        for b in dict.fromkeys(self.of[n] for n in names):
            if not self.held[b].whole:
                how = "is waited for too late" if self.held[b].coming else "is not gathered"
                self.findings.add("GATHER", f"{by} reads {self.name(b)}, which {how}", once=f"{b}")

    def write(self, names: Sequence[str], by: str) -> None:
        """A call writes gradients of parameters."""
        for b in dict.fromkeys(self.of[n] for n in names):
            held = self.held[b]
            if not held.room:
                self.findings.add("GRADIENT", f"{by} writes gradients of {self.name(b)}, whose buffer is another's",
                                  once=f"{b}")  # fmt: skip
            if held.summing:
                self.findings.add("GRADIENT", f"{by} writes gradients of {self.name(b)} while they are summed",
                                  once=f"{b}")  # fmt: skip
            held.written, held.summed = True, False

    def gather(self, b: int) -> None:
        """An all-gather starts: what its buffer held is lost."""
        for other in self._sharing(self._parameters, b):
            if self.held[other].coming:
                self.findings.add("GATHER", f"{self.name(b)} is gathered over {self.name(other)}, still under way")
            self.held[other].whole = False
        self.held[b].whole, self.held[b].coming = False, True

    def wait_all_gather(self, b: int) -> None:
        """Nothing is under way where parameters were whole all along."""
        if self.held[b].coming:
            self.held[b].coming, self.held[b].whole = False, True

    def acquire(self, b: int) -> None:
        """The buffer of gradients becomes this bucket's."""
        for other in self._sharing(self._gradients, b):
            if self.held[other].written or self.held[other].summing:
                self.findings.add("GRADIENT", f"gradients of {self.name(b)} go over those of {self.name(other)}, which "
                                  "are not summed yet")  # fmt: skip
            self.held[other].room = False
        self.held[b].room = True

    def reduce(self, b: int) -> None:
        """The gradients' collective starts."""
        held, bucket = self.held[b], self.flats[b].bucket
        if not bucket.summed:
            return
        held.written, held.summing = False, True
        held.scattered = bucket.shards > 1 and len(bucket.replicate_ranks) > 1

    def wait_reduce_scatter(self, b: int) -> None:
        """The shard's sum is there."""
        self._end(b)

    def replicate(self, b: int) -> None:
        """The sum over replicas starts."""
        held, apart = self.held[b], self.flats[b].bucket.cut_gradients
        held.scattered, held.summing, held.sharing = False, not apart, apart

    def widen(self, b: int) -> None:
        """The last sum is there."""
        self._end(b)

    def _end(self, b: int) -> None:
        held = self.held[b]
        held.summing, held.sharing, held.summed = False, False, True

    def use(self, b: int, by: str) -> None:
        """The norm or the update reads the gradients of the shard."""
        held, bucket = self.held[b], self.flats[b].bucket
        if not bucket.summed:
            return
        flying = held.summing or held.sharing
        if held.written or not (held.summed or flying):
            self.findings.add("REDUCE", f"{by} of {self.name(b)}, whose gradients are not reduced", once=f"{b}")
        elif flying:
            self.findings.add("REDUCE", f"{by} of {self.name(b)}, whose reduction is not waited for", once=f"{b}")
        elif held.scattered:
            self.findings.add("REDUCE", f"{by} of {self.name(b)}, whose replicas are not summed", once=f"{b}")

    def update(self, b: int) -> None:
        """The shard's parameters change: what is gathered of them is old."""
        self.use(b, "an update")
        bucket = self.flats[b].bucket
        self.held[b].summed = False
        if bucket.gathered_after_update or bucket.cut_parameters:
            self.held[b].whole = False

    def _sharing(self, places: Sequence[Place], b: int) -> Iterator[int]:
        """Other buckets in the same memory."""
        return (i for i, at in enumerate(places) if i != b and overlap(at, places[b]))
