"""A tape's shapes at each micro-batch size, of one recording that leaves that size open.

What a network says does not hang on the number of sequences of a micro-batch: it is a dim of shapes and no more. So a
tape is recorded with a size that no other comes near, and in every dim there is a multiple of it and a rest, which
tell what the dim is at any other size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penteract.ops.spec import Spec
from penteract.ops.tape import Site, Tape

OPEN = 2**31 - 1  # sequences; a prime above every other dim, so that no product or quotient of those is taken for it


class Sized(NamedTuple):
    """What a tape says at one micro-batch size. `specs` of its values, in their order; `sites` as they are given."""

    specs: Sequence[Spec]
    inputs: Mapping[str, Spec]
    exit: Spec | None
    sites: Sequence[Site]


def sized(tape: Tape, sites: Iterable[Site], size: int) -> Sized:
    """A tape that was recorded with micro-batches of `OPEN` sequences, as it is with `size` of them."""
    known: dict[Spec, Spec] = {}

    def at_size(spec: Spec) -> Spec:
        if spec not in known:
            known[spec] = Spec(tuple([_dim(d, size) for d in spec.shape]), spec.role)
        return known[spec]

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
    """Few say a size that hangs on the micro-batch's: the others are shared."""
    if not any(isinstance(value, int) and value >= OPEN for value in attrs.values()):
        return attrs
    return {name: _dim(value, size) for name, value in attrs.items()}


def _dim(dim: Any, size: int) -> Any:
    """Any other attribute than a size is left as it is."""
    if not isinstance(dim, int) or dim < OPEN:
        return dim
    times, rest = divmod(dim, OPEN)
    return times * size + rest
