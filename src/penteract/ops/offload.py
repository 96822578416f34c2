"""Activation offload to the host: an edit of a chunk's calls, before any reading.

Copying to the host starts as soon as a value exists. It ends with the layer for a layer's input, and with the next
layer that offloads anything for a value made inside a layer. In backward a value is copied back while the previous
layer (in backward order) runs. So values of at most two layers are in flight at any time; they take turns in a ring
buffer of two places. A layer's input is made by the layer before, so it is copied from its own register.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from penteract.ops.spec import Spec
from penteract.ops.tape import Call, OpCall, Site, Tape

LAYER_INPUTS = "layer_inputs"  # the inputs of layers, which full recomputation keeps
Copy = Literal["to_host", "from_host"]
OFFLOAD_OPS: tuple[Copy, ...] = ("to_host", "from_host")


@dataclass(slots=True)
class Offload:
    """Inserts copies into lists of calls by action, `Fwd` first.

    op_names  layer -> the ops whose results are offloaded, `LAYER_INPUTS`, or "*" for all that it keeps
    specs     of all registers; those on the host are added
    turns     register -> its turn of the ring buffer in its action
    copies    the site of a copy -> the value of the tape that it copies
    """

    tape: Tape
    op_names: Callable[[int], Collection[str]]
    producer: Mapping[int, OpCall]
    layer_inputs: Mapping[int, int]  # register -> the layer whose input it is
    specs: list[Spec]
    turns: dict[int, int] = field(default_factory=dict[int, int])
    copies: dict[Site, int] = field(default_factory=dict[Site, int])
    host: dict[int, int] = field(default_factory=dict[int, int])  # register -> its copy on the host

    def apply(self, lists: Mapping[str, list[Call]]) -> dict[str, list[Call]]:
        """The lists with their copies."""
        leaving = self._leaving(lists)
        for r in leaving:
            self.specs.append(self.specs[r]._replace(pinned=True))
            self.host[r] = len(self.specs) - 1
        ways = {name: self._away if name == "Fwd" else self._back for name in lists}
        return {name: ways[name](calls, leaving) for name, calls in lists.items()}

    # ---- which ---------------------------------------------------------------------------------------------------

    def _leaving(self, lists: Mapping[str, list[Call]]) -> dict[int, int]:
        """Registers to offload: made in forward, used after it -> the layer that uses them then."""
        made = {r for c in lists["Fwd"] for r in c.outs}
        if self.tape.entry is not None:
            made.add(self.tape.entry)
        users = defaultdict[int, set[int]](set)
        for name, calls in lists.items():
            for c in calls if name != "Fwd" else ():
                for r in made & {*c.ins}:
                    users[r].add(c.site.layer)
        return {r: min(layers) for r, layers in users.items() if len(layers) == 1 and self._chosen(r, min(layers))}

    def _chosen(self, r: int, layer: int) -> bool:
        op_names, spec = self.op_names(layer), self.specs[r]
        if layer < 0 or not op_names or spec.role == "host" or not all(isinstance(d, int) for d in spec.shape):
            return False  # sizes that depend on routing get no space on the host
        if r in self.layer_inputs:
            return self.layer_inputs[r] == layer and not {LAYER_INPUTS, "*"}.isdisjoint(op_names)
        op = self.producer.get(r)
        return op is not None and op.site.layer == layer and not {*op.names(r), "*"}.isdisjoint(op_names)

    # ---- away ----------------------------------------------------------------------------------------------------

    def _away(self, calls: list[Call], leaving: Mapping[int, int]) -> list[Call]:
        first, last = _extent(calls)
        there = _available(calls)
        inside = [r for r in there if r in leaving and r not in self.layer_inputs]
        turns = list(dict.fromkeys(leaving[r] for r in inside))
        until = {layer: last[after] for layer, after in pairwise(turns)}
        before, after = defaultdict[int, list[Call]](list), defaultdict[int, list[Call]](list)
        for r, layer in leaving.items():
            if r in self.layer_inputs:
                start, finish = self._copy("to_host", layer, r, r, self.host[r])
                before[first[layer]].append(start)
                after[last[layer]].append(finish)
        for r in inside:
            layer = leaving[r]
            start, finish = self._copy("to_host", layer, r, r, self.host[r])
            after[there[r]].append(start)
            after[until.get(layer, len(calls) - 1)].append(finish)
            self.turns[r] = turns.index(layer)
        return _insert(calls, before, after, {})

    # ---- back ----------------------------------------------------------------------------------------------------

    def _back(self, calls: list[Call], leaving: Mapping[int, int]) -> list[Call]:
        first, _ = _extent(calls)
        use: dict[int, int] = {}
        for i, c in enumerate(calls):
            for r in c.ins:
                if r in leaving:
                    use.setdefault(r, i)
        turns = list(dict.fromkeys(leaving[r] for r in use))
        starts = dict(zip(turns, [0, *(first[layer] for layer in turns)], strict=False))
        before, names = defaultdict[int, list[Call]](list), dict[int, int]()
        finishes = list[tuple[int, Call]]()
        for r, i in use.items():
            layer = leaving[r]
            self.specs.append(self.specs[r])
            names[r] = len(self.specs) - 1
            self.turns[names[r]] = turns.index(layer)
            start, finish = self._copy("from_host", layer, r, self.host[r], names[r])
            before[starts[layer]].append(start)
            finishes.append((i, finish))
        for i, finish in finishes:
            before[i].append(finish)
        return _insert(calls, before, {}, names)

    def _copy(self, op_name: Copy, layer: int, value: int, x: int, y: int) -> tuple[Call, Call]:
        """Start and finish of a copy of `value`, from register x to register y."""
        site = copy_of(op_name, self.specs[value], layer, self._line(value))
        self.copies[site] = value
        return Call(site, "start", (x,), (y,)), Call(site, "finish", (x, y), ())

    def _line(self, value: int) -> str:
        op = self.producer.get(value)
        return op.site.line if op is not None else ""


def as_copy(op_name: str) -> Copy:
    """The op of a copy."""
    return "to_host" if op_name == "to_host" else "from_host"


def copy_of(op_name: Copy, spec: Spec, layer: int, line: str) -> Site:
    """The site of a copy of a value with this spec."""
    there = spec._replace(pinned=True)
    ins, outs = ((spec,), (there,)) if op_name == "to_host" else ((there,), (spec,))
    return Site(op_name, ins, outs, layer=layer, line=line)


def _extent(calls: Sequence[Call]) -> tuple[dict[int, int], dict[int, int]]:
    """The first and the last call of each layer."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, c in enumerate(calls):
        first.setdefault(c.site.layer, i)
        last[c.site.layer] = i
    return first, last


def _available(calls: Iterable[Call]) -> dict[int, int]:
    """Register -> the call after which it can be read."""
    there: dict[int, int] = {}
    for i, c in enumerate(calls):
        there |= dict.fromkeys(c.outs, i)
        if c.phase == "finish":
            there[c.ins[-1]] = i
    return there


def _insert(
    calls: Sequence[Call], before: Mapping[int, list[Call]], after: Mapping[int, list[Call]], names: Mapping[int, int]
) -> list[Call]:
    out = list[Call]()
    for i, c in enumerate(calls):
        out += before.get(i, ())
        if names and not names.keys().isdisjoint(c.ins):
            c = replace(c, ins=tuple(names.get(r, r) for r in c.ins))
        out.append(c)
        out += after.get(i, ())
    return out
