"""What fused attention declarations have in common: scores never reach memory (Dao 2023, 2307.08691).

Their kernels take tokens in the order of the sequence, and make tensors of their own, which are copied to registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penteract.config.layout import AttentionKernel, Layout
from penteract.ops.declarations.attention import Attention
from penteract.ops.declarations.declaration import Attrs, CallShapes, OpDeclaration, Registers, Serves, Shape, WorkRates
from penteract.ops.spec import Widths
from penteract.ops.tape import Site
from penteract.units import Seconds

STATE = 16  # what backward is handed of it
RANDOM = 24  # of a random number generator's state, which nothing draws from


class FusedAttention(Attention):
    """`dealt`: heads were dealt to context ranks, so all tokens lie as these had them, and their order is restored."""

    flash = False  # whether it is as fast as the flash kernel, or as cuDNN's

    def __init__(self, *, dealt: bool = False) -> None:
        """`dealt`: whether heads were dealt to context ranks before the call."""
        self.dealt = dealt

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        """By FLOPs, as a whole was measured. Masked scores are spared."""
        backward, size = call.phase != "forward", int(call.attrs["head_size"])
        flops = self.flops(*call)
        return self.part, rates.attention(flops, backward=backward, causal=True, head_size=size, flash=self.flash)

    def restored(self, phase: str, ins: Sequence[Shape], attrs: Attrs, widths: Widths) -> int:
        """Bytes of what is copied to the order of the sequence: gathered keys and values; where heads were dealt, all.

        Forward: q, k, v. Backward: o, its gradient and log-sum-exp too.
        """
        (s, b, width), t, compute = ins[0], ins[1][0], widths["compute"]
        q, k, v = (prod(shape) * compute for shape in ins[:3])
        if not self.dealt:
            return k + v if s < t else 0
        o, rows = q // attrs["head_size"] * attrs["value_size"], b * width // attrs["head_size"] * s * widths["stat"]
        return q + k + v + (2 * o + rows if phase != "forward" else 0)


def asked_for(name: AttentionKernel, kind: type[FusedAttention]) -> Serves:
    """Where a layout asks for this kernel by name."""
    plain, dealt = kind(), kind(dealt=True)

    def serves(site: Site, layout: Layout) -> OpDeclaration | None:
        if layout.attention != name:
            return None
        return dealt if layout.cp > 1 and layout.cp_method == "ulysses" else plain

    return serves
