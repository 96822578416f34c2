"""Plans for trainers whose pointwise ops are one kernel each, as those of Megatron-LM and nanotron are.

The registry selects them as any implementation; nothing here runs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from penteract.ops.bodies import OPS, Body, Implementation


def _fused(body: Body) -> Implementation:
    """As the op declares it, but for its kernels: one, that reads and writes each register once."""
    made: Body = type("OneKernel", (type(body),), {"traffic": Body.traffic})()
    return Implementation("fused", lambda site, layout: made, {})


@contextmanager
def fused() -> Iterator[None]:
    """Whatever is planned meanwhile computes these ops so."""
    ops = {word: op for word, op in OPS.items() if type(op.declaration).traffic is not Body.traffic}
    with patch.dict(OPS, {word: op._replace(implementations=(_fused(op.declaration),)) for word, op in ops.items()}):
        yield
