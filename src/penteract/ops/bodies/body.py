"""What a word's body declares: results, what it keeps for which gradient, FLOPs, workspace.

FLOPs are those of matrix products (2·m·n·k each); everything else is bytes moved. Shapes reach `flops` and `workspace`
as plain numbers, with the sizes that routing decides already filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penteract.ops.spec import Spec, Widths

Specs = tuple[Spec, ...]
Shape = tuple[int, ...]
Attrs = Mapping[str, Any]

BOOL = 1  # bytes of an element of a mask
FLOAT = 4  # bytes of a scale


class Product(NamedTuple):
    """`times` products [m, k]·[k, n] -> [m, n]."""

    times: int
    m: int
    n: int
    k: int


def linear_products(phase: str, rows: int, width: int, out: int) -> tuple[Product, ...]:
    """x [rows, width] times w [out, width], and its two gradients, which turn the same three sizes round."""
    sizes = {"forward": (rows, out, width), "input_gradient": (rows, width, out), "weight_gradient": (out, width, rows)}
    return (Product(1, *sizes[phase]),)


class Body:
    """The declaration of one word. Names of what is kept: in0, in1, … out0, … extra0, …"""

    differentiable: tuple[int, ...] = (0,)  # ins that get a gradient
    input_keeps: tuple[str, ...] = ()
    weight_keeps: tuple[str, ...] = ()
    deferrable = False  # may the weight gradient run at any later time
    passes_gradient = False  # the input gradient of every differentiable in *is* the gradient of out0
    overwrites: tuple[int, ...] = ()  # ins that forward leaves its results in: nobody else may want what was there

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        """-> results, extras"""
        return (ins[0],), ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        """The outs whose gradients the input gradient reads."""
        return (0,)

    def carry(self, ins: Sequence[Spec], attrs: Attrs) -> Specs:
        """What the input gradient hands to the weight gradient; nothing: the gradients themselves."""
        return ()

    def products(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[Product, ...]:
        """The matrix products of a phase."""
        return ()

    def flops(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> int:
        return sum(2 * p.times * p.m * p.n * p.k for p in self.products(phase, ins, weights, attrs))

    def agreed(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[str, int]:
        """(axis, n): a body that asks the ranks of an axis for the largest of n fp32 numbers before it computes."""
        return "", 0

    def of_codes(self, phase: str) -> bool:
        """Whether the products of a phase are of FP8 codes."""
        return False

    def passes(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], widths: Widths) -> int:
        """Bytes that a body with products reads and writes before them."""
        return 0

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Bytes that the reference body allocates at its worst moment beside its results, freed on return."""
        return 0


def mixed(widths: Widths) -> bool:
    """Whether statistics have another dtype than activations."""
    return widths["compute"] != widths["stat"]


def widened(elements: int, widths: Widths) -> int:
    """Bytes of activations copied to the dtype of statistics; where that is theirs, there is no copy."""
    return elements * widths["stat"] if mixed(widths) else 0


def narrow_product(elements: int, widths: Widths) -> int:
    """Bytes of a weight gradient made beside its bucket, because the bucket has another dtype than the factors."""
    return elements * widths["compute"] if widths["gradient"] != widths["compute"] else 0


def wide_product(elements: int, widths: Widths) -> int:
    """The same, of factors in the dtype of statistics."""
    return elements * widths["stat"] if widths["gradient"] != widths["stat"] else 0
