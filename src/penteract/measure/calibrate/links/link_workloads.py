"""What is measured between ranks, the most used first. All ranks have the same list, and go through it together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from penteract.measure.calibrate.measured_rows import Key

Ranks = tuple[int, ...]
# alone       a collective, a message or a copy
# under       the same while products run beside it
# contended   products while it runs
Way = Literal["alone", "under", "contended"]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SEND, SHIFT, PAIR, PRODUCT = "send", "shift", "pair", "product"
COPIES = ("h2d_all", "d2h_all")  # all devices of the host at once
# Bytes of the whole tensor, the most used first. Products are slowed by the first of them.
ON_GPU = (2**26, 2**20, 2**28, 2**16, 2**22, 2**24, 2**18)
ON_CPU = (2**20, 2**16, 2**24, 2**18, 2**22)


class LinkWorkload(NamedTuple):
    """`groups`: all measure at once, a rank is in one at most; of a message they are (sender, receiver). `size`: bytes
    of the whole tensor. `apart`: each group has a row of its own."""

    way: Way
    kind: str
    groups: tuple[Ranks, ...]
    size: int
    apart: bool = False

    @property
    def rows(self) -> list[tuple[Key, Ranks]]:
        """The keys of its rows, and the ranks whose times count for each."""
        if self.apart:
            return [((self.kind, *group, self.size), group) for group in self.groups]
        first = {"alone": "link", "under": "link_under_product", "contended": "product_under_link"}[self.way]
        start = (self.kind,) if self.kind in COPIES else (first, self.kind)
        return [((*start, len(self.groups[0]), self.size), tuple(r for group in self.groups for r in group))]

    @property
    def alone(self) -> Key:
        """The key of the same without products."""
        return self._replace(way="alone").rows[0][0]

    def group(self, rank: int) -> Ranks | None:
        """The group of a rank; None where it is in none."""
        return next((group for group in self.groups if rank in group), None)


def link_workloads(world: int, sizes: Sequence[int], *, gpu: bool) -> list[LinkWorkload]:
    """Every collective over every group size, messages, copies and pairs; then the same beside products."""
    ranks, first = tuple(range(world)), sizes[0]
    plain = {size: [*_collectives(world, size), *_messages(world, size)] for size in sizes}
    widest = [w for w in plain[first] if w.groups == (ranks,)]
    found = [products_alone(world), *plain[first], *(w._replace(way="contended") for w in widest)]
    found += [LinkWorkload("alone", kind, (ranks,), first) for kind in COPIES if gpu]
    found += [w for size in sizes[1:] for w in plain[size]]
    found += pairs(world, first)
    return found + [w._replace(way="under") for size in sizes for w in plain[size]]


def products_alone(world: int) -> LinkWorkload:
    """Products on all devices at once, without any communication."""
    return LinkWorkload("contended", PRODUCT, (tuple(range(world)),), 0)


def pairs(world: int, size: int) -> list[LinkWorkload]:
    """A message from each device to each other one."""
    return [LinkWorkload("alone", PAIR, groups, size, apart=True) for groups in _rounds(world)]


def group_sizes(world: int) -> list[int]:
    """All devices, then 2, 4, … of them."""
    return [world, *(n for n in (2**i for i in range(1, world.bit_length())) if n < world)]


def chunks(world: int, size: int) -> tuple[Ranks, ...]:
    """Groups of neighbours. Ranks that are left over are in none."""
    return tuple(tuple(range(at, at + size)) for at in range(0, world - size + 1, size))


def _collectives(world: int, size: int) -> Iterator[LinkWorkload]:
    for n in group_sizes(world):
        yield from (LinkWorkload("alone", kind, chunks(world, n), size) for kind in COLLECTIVES)


def _messages(world: int, size: int) -> Iterator[LinkWorkload]:
    """To a neighbour as pipelines do, and around rings as context parallelism does: a send and a receive at once."""
    yield LinkWorkload("alone", SEND, chunks(world, 2), size)
    yield from (LinkWorkload("alone", SHIFT, chunks(world, n), size) for n in group_sizes(world))


def _rounds(world: int) -> Iterator[tuple[Ranks, ...]]:
    """All pairs in rounds of disjoint ones, there and back: the first seat stays, the others go round."""
    seats = [*range(world), *[-1] * (world % 2)]  # -1: the other of this pair sits out
    for _ in range(len(seats) - 1):
        both = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        found = tuple((min(pair), max(pair)) for pair in both if min(pair) >= 0)
        yield found
        yield tuple((b, a) for a, b in found)
        seats = [seats[0], seats[-1], *seats[1:-1]]
