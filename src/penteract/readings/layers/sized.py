"""A tape's shapes at any micro-batch size, from one recording that leaves this size open.

The ops of a network do not depend on the micro-batch size: it only occurs in shapes. So a tape is recorded with a size
`OPEN` that is far larger than any other dim. Every dim is then a·OPEN + b, and at size n it is a·n + b.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penteract.ops.spec import Received, Spec
from penteract.ops.tape import Site, Tape

OPEN = 2**31 - 1  # sequences; a prime above every other dim, so no product or quotient of dims can be mistaken for it


class Sized(NamedTuple):
    """The shapes of a tape at one micro-batch size. `specs` of its values, in order; `sites` as they were given."""

    specs: Sequence[Spec]
    inputs: Mapping[str, Spec]
    exit: Spec | None
    sites: Sequence[Site]


def sized(tape: Tape, sites: Iterable[Site], size: int) -> Sized:
    """The shapes, with `size` sequences, of a tape that was recorded with `OPEN` sequences in a micro-batch."""
    cache: dict[Spec, Spec] = {}

    def at_size(spec: Spec) -> Spec:
        if spec not in cache:
            cache[spec] = Spec(tuple([_dim(d, size) for d in spec.shape]), spec.role)
        return cache[spec]

    specs = [at_size(spec) for spec in tape.specs]
    return Sized(
        specs=specs,
        inputs={name: specs[v] for name, v in tape.inputs.items()},
        exit=None if tape.exit is None else specs[tape.exit],
        sites=[
            Site(s.op_name, tuple(map(at_size, s.ins)), tuple(map(at_size, s.outs)), s.params, s.weights,
                 _attributes(s.attrs, size), s.layer, s.line)
            for s in sites
        ],
    )  # fmt: skip


def _attributes(attrs: Mapping[str, Any], size: int) -> Mapping[str, Any]:
    """Attributes at this size. Few depend on the micro-batch size; the others are shared."""
    if not any(_dim(value, 0) is not value for value in attrs.values()):
        return attrs
    return {name: _dim(value, size) for name, value in attrs.items()}


def _dim(dim: Any, size: int) -> Any:
    """A dim at this size. Anything that does not depend on the micro-batch size is returned unchanged."""
    if isinstance(dim, Received):
        return dim._replace(at_most=_dim(dim.at_most, size)) if dim.at_most else dim
    if not isinstance(dim, int) or dim < OPEN:
        return dim
    times, rest = divmod(dim, OPEN)
    return times * size + rest
