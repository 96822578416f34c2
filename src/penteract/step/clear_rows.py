"""Tables of which a step uses few rows: the others' gradients are zero, and are neither written nor read again.

Where nothing but look-ups writes a table's gradient, and no other rank adds to it, its buffer stays as the last step
left it. So that a step can tell which rows that used, the first number of a row in use is never +0.0: it is -0.0 where
it would be. A kernel then clears the rows in use, and those that read gradients leave out the others, without a list
of either. All other readers see a gradient as any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from penteract.step.program import Program


@dataclass(frozen=True, slots=True)
class ClearRows:
    """Elements `begin` to `end` of a bucket, a table in rows of `width`."""

    begin: int
    end: int
    width: int

    def tiled(self, size: int) -> bool:
        """Whether a tile of so many elements, in order from the bucket's first, is of one row or none."""
        return self.begin % size == 0 and self.width % size == 0


def clear_rows(p: Program) -> dict[str, ClearRows]:
    """By name, the tables of a rank whose rows are kept clear: on GPUs, by kernels of `elementwise`."""
    if p.layout.elementwise != "triton":
        return {}
    sites = [op.site for c in p.chunks for op in c.tape.ops if op.site.params]
    looked_up = {n for s in sites if s.op_name == "embedding" for n in s.params}
    looked_up -= {n for s in sites if s.op_name != "embedding" for n in s.params}
    found = dict[str, ClearRows]()
    for b in p.buckets:
        for q, at in zip(b.params, b.offsets, strict=True):
            if q.name in looked_up and not (b.summed or b.cut_gradients or b.shards > 1):
                found[q.name] = ClearRows(at, at + q.numel(p.mesh), q.local_shape(p.mesh)[-1])
    return found
