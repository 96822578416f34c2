"""The bytes that a rehearsal counted, held to the price of the same program, by owner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from penteract.measure.rehearse.checks.kernel_calls import TABLES
from penteract.measure.rehearse.findings import Findings
from penteract.measure.rehearse.ledger import HOST, REST, ROUTED, WORKSPACE
from penteract.readings.price import Price

ACTIVATIONS, VALIDATION = "activations", "validation"
SMALL = 4096  # bytes of scalars that an update's workspace may have more than its price: a norm, a factor
UNPRICED = {  # what a price leaves out, because it does not grow: a difference that is named, and no fault
    REST: "counts, scalars and lists that no price has",
    TABLES: "angles, codebooks and places that kernels make once",
    HOST: "batches on their way to the device",
    VALIDATION: "what validation needs beyond the step's activations",
}


class OwnerCount(NamedTuple):
    """Bytes of an owner: `most` at any time, `at_peak` at the peak of all; `priced`: -1 where no price has it."""

    name: str
    most: int
    at_peak: int
    priced: int
    why: str = ""

    @property
    def difference(self) -> int:
        """Bytes that are rehearsed and not priced."""
        return self.most - max(0, self.priced)


def priced_by_owner(price: Price) -> dict[str, int]:
    """The price's bytes by the owners of a rehearsal."""
    outside = {ACTIVATIONS: price.arena, ROUTED: price.routed, WORKSPACE: price.workspace, HOST: price.host}
    return {**price.resident, **{name: size for name, size in outside.items() if size}}


def owners(largest: Mapping[str, int], at_peak: Mapping[str, int], price: Price) -> Iterator[OwnerCount]:
    """All owners, those of the price first."""
    priced = priced_by_owner(price)
    for name in dict.fromkeys((*priced, *(n for n, size in largest.items() if size))):
        most, there = largest.get(name, 0), at_peak.get(name, 0)
        yield OwnerCount(name, most, there, priced.get(name, -1), _why(name, most, priced.get(name, -1)))


def _why(name: str, most: int, priced: int) -> str:
    """What a difference comes from, where it is none of a fault."""
    if most == priced:
        return ""
    if name in UNPRICED and most > priced:
        return UNPRICED[name]
    if name == WORKSPACE and most < priced:
        return "less than kernels declare for their device"
    if name == WORKSPACE and most - priced <= SMALL:
        return "scalars of an update"
    if name == ROUTED and most < priced:
        return "the price adds up the peaks of layers"
    return ""


def check_price(found: list[OwnerCount], findings: Findings) -> None:
    """Note each owner whose bytes the price has not, or has otherwise."""
    for o in found:
        if o.most != max(0, o.priced) and not o.why:
            findings.add(
                "PRICE", f"{o.name} take {o.most:,} bytes, and their price says {max(0, o.priced):,}", "memory"
            )
