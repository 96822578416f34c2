"""What fused attention declarations have in common: scores are never written to memory (Dao 2023, 2307.08691).

Their kernels take tokens in sequence order, and allocate their own results, which are copied to registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.config.layout import AttentionKernel, Layout
from penteract.ops.declarations.attention import Attention
from penteract.ops.declarations.declaration import (
    Attrs,
    CallShapes,
    FusedKernel,
    OpDeclaration,
    Registers,
    Serves,
    Shape,
    WorkRates,
)
from penteract.ops.spec import Widths
from penteract.ops.tape import Site
from penteract.units import Seconds

STATE = 16  # bytes of the generator's state that backward gets
RANDOM = 24  # bytes of a random number generator's state, which is never used


class FusedAttention(Attention):
    """Fused attention. With Ulysses all tokens are there, but ordered by context rank: sequence order is restored."""

    speed: FusedKernel = "cudnn"  # the kernel whose measured speed it has

    def __init__(self, *, ulysses: bool = False, in_order: bool = False) -> None:
        """`ulysses`: whether heads were distributed over context ranks before the call. `in_order`: whether backward
        adds gradients in the same order whenever it is called."""
        self.ulysses, self.in_order = ulysses, in_order

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        """By FLOPs and by elements, from measurements of the whole kernel. Masked scores are not computed."""
        backward, size = call.phase != "forward", int(call.attrs["head_size"])
        flops, elements = self.flops(*call.of_op), prod(call.ins[0])
        return self.part, rates.attention(
            flops, elements, backward=backward, causal=True, head_size=size, kernel=self.speed
        )

    def restored(self, phase: str, ins: Sequence[Shape], attrs: Attrs, widths: Widths) -> int:
        """Bytes of what is copied to sequence order: gathered keys and values; with Ulysses everything.

        Forward: q, k, v. Backward: o, its gradient and log-sum-exp too.
        """
        (s, b, width), t, compute = ins[0], ins[1][0], widths["compute"]
        q, k, v = (prod(shape) * compute for shape in ins[:3])
        if not self.ulysses:
            return k + v if s < t else 0
        o, rows = q // attrs["head_size"] * attrs["value_size"], b * width // attrs["head_size"] * s * widths["stat"]
        return q + k + v + (2 * o + rows if phase != "forward" else 0)


def when_chosen(name: AttentionKernel, kind: type[FusedAttention]) -> Serves:
    """Serves layouts that choose this kernel by name."""
    ways = (False, True)
    declared = {(ulysses, in_order): kind(ulysses=ulysses, in_order=in_order) for ulysses in ways for in_order in ways}

    def serves(site: Site, layout: Layout) -> OpDeclaration | None:
        if layout.attention != name:
            return None
        ulysses = layout.cp > 1 and layout.cp_method == "ulysses"
        return declared[ulysses, layout.determinism == "bitwise"]

    return serves
