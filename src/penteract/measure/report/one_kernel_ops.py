"""Plans for other trainers, such as Megatron-LM and nanotron, whose pointwise ops are one kernel each.

The registry selects these kernels like any implementation; nothing here runs them. The measured host time of our single
calls is not used either: each call takes the average of an eager step.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from penteract.config.hardware import Cluster, reference
from penteract.ops.declarations import OPS, Implementation, OpDeclaration


def _fused(kernel: OpDeclaration) -> Implementation:
    """An implementation as the op declares it, but with one kernel, which reads and writes each register once."""
    declaration: OpDeclaration = type("OneKernel", (type(kernel),), {"traffic": OpDeclaration.traffic})()
    return Implementation("fused", lambda site, layout: declaration, {})


def with_other_host(nodes: Cluster) -> Cluster:
    """The same cluster, without the measured host time of our single calls."""
    return replace(nodes, curves=replace(nodes.curves or reference(), launch_of=()))


@contextmanager
def fused() -> Generator[None]:
    """Within this context, plans use such kernels."""
    ops = {name: op for name, op in OPS.items() if type(op.declaration).traffic is not OpDeclaration.traffic}
    with patch.dict(OPS, {name: op._replace(implementations=(_fused(op.declaration),)) for name, op in ops.items()}):
        yield
