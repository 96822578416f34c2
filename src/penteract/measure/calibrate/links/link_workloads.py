"""What is measured between ranks, the most used first. All ranks have the same list, and go through it together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from penteract.config.files.hardware_schema import DIRECT
from penteract.measure.calibrate.measured_rows import Key

Ranks = tuple[int, ...]
# alone       a collective, a message or a copy, inside hosts
# under       the same while products run beside it
# contended   products while it runs
# between     a collective of whole hosts, or a message from one host to the next
Way = Literal["alone", "under", "contended", "between"]
_KEYS = {"alone": "link", "under": "under", "contended": "contended", "between": "between"}

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
RINGS = COLLECTIVES[:3]  # of which plans take measured bandwidth between hosts
SEND, SHIFT, PAIR, PRODUCT = "send", "shift", "pair", "product"
COPIES = ("h2d_all", "d2h_all")  # all devices of a host at once
# Bytes of the whole tensor, the most used first.
ON_GPU = (2**26, 2**20, 2**28, 2**16, 2**22, 2**24, 2**18)
_LONG = 4  # times the largest
ON_CPU = (2**20, 2**16, 2**24, 2**18, 2**22)


class LinkWorkload(NamedTuple):
    """`groups`: all measure at once, a rank is in one at most; of a message they are (sender, receiver). `size`: bytes
    of the whole tensor. `each`: ranks of a host."""

    way: Way
    kind: str
    groups: tuple[Ranks, ...]
    size: int
    each: int

    @property
    def rows(self) -> list[tuple[Key, Ranks]]:
        """The keys of its rows, and the ranks whose times count for each. Equal pairs of hosts share a row."""
        every = tuple(r for group in self.groups for r in group)
        if self.kind == PAIR:
            found = dict[Key, Ranks]()
            for group in self.groups:
                key = (PAIR, *(r % self.each for r in group), self.size)
                found[key] = (*found.get(key, ()), *group)
            return [*found.items()]
        start = (self.kind,) if self.kind in COPIES else (_KEYS[self.way], self.kind)
        hosts = len({r // self.each for r in self.groups[0]})
        return [((*start, hosts if self.way == "between" else len(self.groups[0]), self.size), every)]

    @property
    def alone(self) -> Key:
        """The key of the same without products."""
        return self._replace(way="alone").rows[0][0]

    def group(self, rank: int) -> Ranks | None:
        """The group of a rank; None where it is in none."""
        return next((group for group in self.groups if rank in group), None)


class Hosts(NamedTuple):
    """`count` hosts with `each` ranks: those of a host follow each other."""

    count: int
    each: int

    def sizes(self) -> list[int]:
        """The sizes of groups inside a host."""
        return _sizes(self.each)

    def groups(self, size: int) -> tuple[Ranks, ...]:
        """Groups of neighbours inside hosts. Ranks that are left over are in none."""
        return self._all(_chunks(self.each, size))

    def whole(self, hosts: int) -> tuple[Ranks, ...]:
        """Groups of so many whole hosts."""
        return _chunks(self.count * self.each, hosts * self.each)

    def host_counts(self) -> list[int]:
        """How many hosts groups of whole ones have."""
        return _sizes(self.count)

    # ---- what is measured --------------------------------------------------------------------------------------

    def workloads(self, sizes: Sequence[int], *, gpu: bool, direct: bool) -> list[LinkWorkload]:
        """Every collective over every group size, messages, copies, between hosts, and pairs; then the same beside
        products. `direct`: whether ranks read each other's memory."""
        first = sizes[0]
        kinds = (*COLLECTIVES, *DIRECT) if direct else COLLECTIVES
        plain = {size: [*self._inside(size, kinds)] for size in sizes}
        widest = [w for w in plain[first] if len(w.groups[0]) == self.each]
        found = [self.products(), *plain[first], *self._between(min(sizes), max(sizes))]
        long = _LONG * max(sizes) if gpu else first  # products run within it
        found += [w._replace(way="contended", size=long) for w in widest if w.kind not in DIRECT]
        found += [self._of("alone", kind, self.groups(self.each), first) for kind in COPIES if gpu]
        found += [w for size in sizes[1:] for w in plain[size]]
        found += self.pairs(first)
        return found + [w._replace(way="under") for size in sizes for w in plain[size]]

    def products(self) -> LinkWorkload:
        """Products on all devices at once, without any communication."""
        return self._of("contended", PRODUCT, self.groups(self.each), 0)

    def pairs(self, size: int) -> list[LinkWorkload]:
        """A message from each device to each other one of its host."""
        return [self._of("alone", PAIR, self._all(groups), size) for groups in _rounds(self.each)]

    def _inside(self, size: int, kinds: Sequence[str]) -> Iterator[LinkWorkload]:
        """Collectives; messages to a neighbour as pipelines send them, and around rings as context parallelism does: a
        send and a receive at once."""
        for n in self.sizes():
            yield from (self._of("alone", kind, self.groups(n), size) for kind in kinds)
        if self.each > 1:
            yield self._of("alone", SEND, self.groups(2), size)
        yield from (self._of("alone", SHIFT, self.groups(n), size) for n in self.sizes())

    def _between(self, least: int, most: int) -> Iterator[LinkWorkload]:
        """Collectives of whole hosts; messages of all devices of a host to those of the next at once."""
        for n in self.host_counts():
            yield from (self._of("between", kind, self.whole(n), most) for kind in RINGS)
        if self.count > 1:
            step, starts = self.each, range(0, self.count - 1, 2)
            groups = tuple((h * step + r, (h + 1) * step + r) for h in starts for r in range(step))
            yield from (self._of("between", SEND, groups, size) for size in (most, least))

    def _of(self, way: Way, kind: str, groups: tuple[Ranks, ...], size: int) -> LinkWorkload:
        return LinkWorkload(way, kind, groups, size, self.each)

    def _all(self, groups: tuple[Ranks, ...]) -> tuple[Ranks, ...]:
        """The same groups of each host."""
        return tuple(tuple(h * self.each + r for r in group) for h in range(self.count) for group in groups)


def _sizes(most: int) -> list[int]:
    """All, then 2, 4, … of them; none of one."""
    return [most, *(n for n in (2**i for i in range(1, most.bit_length())) if n < most)] if most > 1 else []


def _chunks(most: int, size: int) -> tuple[Ranks, ...]:
    return tuple(tuple(range(at, at + size)) for at in range(0, most - size + 1, size))


def _rounds(most: int) -> Iterator[tuple[Ranks, ...]]:
    """All pairs in rounds of disjoint ones, there and back: the first seat stays, the others go round."""
    if most < 2:
        return
    seats = [*range(most), *[-1] * (most % 2)]  # -1: the other of this pair sits out
    for _ in range(len(seats) - 1):
        both = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        found = tuple((min(pair), max(pair)) for pair in both if min(pair) >= 0)
        yield found
        yield tuple((b, a) for a, b in found)
        seats = [seats[0], seats[-1], *seats[1:-1]]
