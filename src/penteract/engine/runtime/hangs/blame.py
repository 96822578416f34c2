"""Which rank a hung run waits for: a function of the records of all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penteract.engine.comm.journal import Kind
from penteract.engine.runtime.hangs.record import Record

_SHOWN = 8  # ranks that a message lists


class Operation(NamedTuple):
    """Operation `number` of a group, by its name."""

    group: str
    number: int


class Verdict(NamedTuple):
    """`ranks`: the culprits, the first of which is the error's rank. `code`: HUNG or UNLIKE."""

    code: str
    ranks: tuple[int, ...]
    what: str


def blame(records: Mapping[int, Record], silent: Collection[int] = ()) -> Verdict | None:
    """The culprits of a hang. None if all that ranks wait for makes progress.

    `silent`: ranks whose beats have stopped. The graph of who waits for whom is searched from the ranks that have made
    no progress for as long as they may, each operation once: this takes time linear in the ranks and their groups.
    """
    graph = _Graph(records, frozenset(silent))
    starts = [r for r, record in records.items() if record.hangs]
    graph.suspects = graph.search(starts)
    graph.search(list(records))  # who else waits for them
    return graph.unlike() or graph.root() or graph.inside() or graph.cycle(starts)


def unlike(records: Mapping[int, Record]) -> Verdict | None:
    """Ranks that wait in unlike operations under one number, however long."""
    graph = _Graph(records, frozenset())
    graph.search([r for r, record in records.items() if record.waits is not None])
    return graph.unlike()


@dataclass(slots=True)
class _Graph:
    """`behind`: operation -> members that hold it up. `waiters`: operation -> members that wait in it."""

    records: Mapping[int, Record]
    silent: frozenset[int]
    members: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    behind: dict[Operation, list[int]] = field(default_factory=dict[Operation, list[int]])
    waiters: dict[Operation, list[int]] = field(default_factory=dict[Operation, list[int]])
    seen: dict[int, None] = field(default_factory=dict[int, None])  # ranks, in the order of the search
    suspects: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        for r, record in self.records.items():
            for name in record.groups:
                self.members.setdefault(name, []).append(r)
            if (op := self.waits(r)) is not None:
                self.waiters.setdefault(op, []).append(r)

    def waits(self, rank: int) -> Operation | None:
        """The operation that a rank waits in; None where it is outside, or nobody knows."""
        found = self.records[rank].waits
        return Operation(*found) if found is not None and rank not in self.silent else None

    def search(self, starts: Sequence[int]) -> list[int]:
        """Find what these ranks wait in, and whom they wait for, directly or not. -> all ranks that were found."""
        ranks = deque(starts)
        while ranks:
            r = ranks.popleft()
            if r in self.seen:
                continue
            self.seen[r] = None
            op = self.waits(r)
            if op is not None and op not in self.behind:
                self.behind[op] = [m for m in self._members(op) if m != r and self._holds_up(m, op)]
                ranks += self.behind[op]
        return list(self.seen)

    def _members(self, op: Operation) -> Sequence[int]:
        """A message has two ends, of which one may not have begun."""
        held = self.members[op.group]
        ends = _ends(op.group)
        return held if ends is None else [r for r in ends if r in self.records]

    def _holds_up(self, rank: int, op: Operation) -> bool:
        """Whether a member has not entered an operation, or was stopped inside."""
        found = self.records[rank].groups.get(op.group)
        if found is None or found.entered < op.number:
            return True
        return rank in self.silent and found.left < op.number

    # ---- verdicts --------------------------------------------------------------------------------------------

    def unlike(self) -> Verdict | None:
        """Members that entered unlike operations under one number."""
        for op in self.behind:
            kinds: dict[Kind, int] = {}  # the first rank of each
            for m in self._members(op):
                found = self.records[m].groups.get(op.group)
                if found is not None and (kind := found.kind(op.number)) is not None:
                    kinds.setdefault(kind, m)
            if len(kinds) > 1:
                rows = list(kinds.items())[:2]
                entered = ", ".join(f"{self._rank(r)} {kind}" for kind, r in rows)
                places = "; ".join(f"rank {r} is in {self.records[r].where()}" for _, r in rows)
                what = f"ranks entered unlike collectives as #{op.number} of group {op.group}: {entered}; {places}"
                return Verdict("UNLIKE", tuple(r for _, r in rows), what)
        return None

    def root(self) -> Verdict | None:
        """Of ranks that wait for nobody, the silent ones; else those that have made no progress for as long as they
        may; else, where all have ended, these."""
        outside = [r for r in self.suspects if self.waits(r) is None]
        gone = sorted(r for r in outside if r in self.silent)
        ranks = gone or sorted(r for r in outside if self.records[r].hangs)
        ended = not ranks and bool(outside) and all(self.records[r].phase == "done" for r in outside)
        ranks = sorted(outside) if ended else ranks
        if not ranks:
            return None
        # Of several operations that it holds up, the one that fewest others hold up too.
        held_up = (op for op, behind in self.behind.items() if ranks[0] in behind)
        op = min(held_up, key=lambda op: len(self.behind[op]), default=None)
        ranks = [r for r in ranks if op is None or r in self.behind[op]]
        first, several = self.records[ranks[0]], len(ranks) > 1
        place = f"rank {ranks[0]} {'was' if gone or ended else 'is'} in {first.where()}"
        if gone:
            what = f"{self._ranks(ranks)} {'give' if several else 'gives'} no sign of life"
        elif op is not None:
            what = f"{self._ranks(ranks)} {'have' if several else 'has'} not entered {self._name(op)}"
            what += f" and {'have' if several else 'has'} ended" * ended
        else:
            what = f"{self._ranks(ranks)} {'hang' if several else 'hangs'}: no progress for {first.idle:.0f} s"
        wait = f"; {self._wait_of(op)}" if op is not None else ""
        if gone and op is not None:
            wait = f"; {self._wait_of(op, self._name(op))}"
        return Verdict("HUNG", tuple(ranks), f"{what}{wait}; {place}")

    def inside(self) -> Verdict | None:
        """A group of which all members have entered what some wait in: the network between them."""
        ended = (op for op, behind in self.behind.items() if not behind)
        op = next((op for op in ended if all(self.records[r].hangs for r in self.waiters[op])), None)
        if op is None:
            return None
        hosts = list(dict.fromkeys(self.records[m].host for m in self._members(op)))
        link = f"the links between hosts {_some(hosts)}" if len(hosts) > 1 else f"host {hosts[0]} and its links"
        first = self.waiters[op][0]
        what = f"all ranks have entered {self._name(op)}, and it does not end; {self._wait_of(op)}; look at {link}"
        return Verdict("HUNG", tuple(self.waiters[op]), f"{what}; rank {first} is in {self.records[first].where()}")

    def cycle(self, starts: Sequence[int]) -> Verdict | None:
        """Ranks that wait for each other, each in an operation that the next has not entered."""
        visited = set[int]()
        for r in starts:
            path: dict[int, Operation] = {}
            while r not in visited and r not in path and (op := self.waits(r)) is not None and self.behind.get(op):
                path[r] = op
                r = self.behind[op][0]
            if r in path:
                loop = list(path)[list(path).index(r) :]
                if all(self.records[a].hangs for a in loop):
                    return self._loop(loop, path)
            visited.update(path)
        return None

    def _loop(self, loop: Sequence[int], path: Mapping[int, Operation]) -> Verdict:
        rows = [f"{self._rank(a)} in {self._name(path[a])} for rank {self.behind[path[a]][0]}" for a in loop[:_SHOWN]]
        places = "; ".join(f"rank {a} is in {self.records[a].where()}" for a in loop[:2])
        return Verdict("UNLIKE", tuple(loop), f"ranks wait for each other: {', '.join(rows)}; {places}")

    # ---- words -----------------------------------------------------------------------------------------------

    def _name(self, op: Operation) -> str:
        kind = self.records[self.waiters[op][0]].groups[op.group].kind(op.number)
        return f"{kind.name if kind is not None else 'operation'} #{op.number} of group {op.group}"

    def _wait_of(self, op: Operation, name: str = "it") -> str:
        ranks = self.waiters[op]
        idle = max(self.records[r].idle for r in ranks)
        return f"{_listed(ranks)} {'wait' if len(ranks) > 1 else 'waits'} in {name} since {idle:.0f} s"

    def _rank(self, rank: int) -> str:
        return self._ranks([rank])

    def _ranks(self, ranks: Sequence[int]) -> str:
        """With their hosts: `ranks 1, 2 (hosts a, b)`."""
        hosts = list(dict.fromkeys(host for r in ranks if (host := self.records[r].host)))
        at = f" (host{'s' * (len(hosts) > 1)} {_some(hosts)})"
        return f"{_listed(ranks)}{at * bool(hosts)}"


def _listed(ranks: Sequence[int]) -> str:
    """As `ranks 1, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {_some(list(map(str, ranks)))}"


def _some(names: Sequence[str]) -> str:
    more = f", … ({len(names)})" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _ends(group: str) -> tuple[int, int] | None:
    """(sender, receiver) of a group of messages, as `pp value 0 to 1`; None for other groups."""
    words = group.split()
    if len(words) == 5 and words[3] == "to" and words[2].isdigit() and words[4].isdigit():
        return int(words[2]), int(words[4])
    return None
