"""Plans for trainers whose pointwise ops are one kernel each, as those of Megatron-LM and nanotron are.

The registry selects them as any implementation; nothing here runs them. Their host is not this program's, either: what
was measured of its calls one by one is left out, and each takes what a call of an eager step takes on average.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from penteract.config.hardware import Cluster, reference
from penteract.ops.declarations import OPS, Implementation, OpDeclaration


def _fused(kernel: OpDeclaration) -> Implementation:
    """As the op declares it, but for its kernels: one, that reads and writes each register once."""
    made: OpDeclaration = type("OneKernel", (type(kernel),), {"traffic": OpDeclaration.traffic})()
    return Implementation("fused", lambda site, layout: made, {})


def theirs(nodes: Cluster) -> Cluster:
    """The same cluster, without what is known of this program's host."""
    return replace(nodes, curves=replace(nodes.curves or reference(), launch_of=()))


@contextmanager
def fused() -> Iterator[None]:
    """Whatever is planned meanwhile computes these ops so."""
    ops = {word: op for word, op in OPS.items() if type(op.declaration).traffic is not OpDeclaration.traffic}
    with patch.dict(OPS, {word: op._replace(implementations=(_fused(op.declaration),)) for word, op in ops.items()}):
        yield
