"""The layers whose experts get rows of other ranks."""

from __future__ import annotations

from penteract.step.program import Program


def layers_with_rows(p: Program) -> list[int]:
    """Those of a rank, in order: each gets another number of rows in every micro-batch."""
    if p.layout.ep == 1:
        return []
    counted = "expert_offsets" if p.layout.pads_rows else "split_sizes"
    return sorted({op.site.layer for c in p.chunks for op in c.tape.ops if op.site.op_name == counted})
