"""Where an action of a layer reads its parameters and writes their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penteract.ops.declarations.registry import is_attention_backward
from penteract.ops.tape import Phase, Site

NEVER = -1  # no call


class Touched(NamedTuple):
    """A parameter of a layer: the calls that first read it, and that first and last write its gradient."""

    name: str
    read: int
    written: int
    last: int


class Touches(NamedTuple):
    """What the calls of an action touch. `attention`: those that are backward passes of attention."""

    params: tuple[Touched, ...]
    attention: tuple[int, ...]

    @staticmethod
    def of(calls: Iterable[tuple[int, Phase]], sites: Sequence[Site]) -> Touches:
        """Of these calls, each the place of its site in `sites`, and its phase."""
        found, attention = dict[str, Touched](), list[int]()
        for at, (place, phase) in enumerate(calls):
            site = sites[place]
            if is_attention_backward(site.op_name, phase):
                attention.append(at)
            for name in site.params:
                _, read, written, last = found.get(name, (name, NEVER, NEVER, NEVER))
                if phase == "weight_gradient":
                    written, last = at if written == NEVER else written, at
                elif read == NEVER:
                    read = at
                found[name] = Touched(name, read, written, last)
        return Touches(tuple(found.values()), tuple(attention))
