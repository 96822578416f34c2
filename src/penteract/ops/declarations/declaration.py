"""What an op declares: results, what it keeps for which gradient, FLOPs; and what an implementation of it declares:
workspace, what its ranks agree on, cost.

FLOPs are those of matrix products (2·m·n·k each); everything else is bytes moved. Shapes reach `flops`, `workspace`,
`traffic` and `cost` as plain numbers, with the sizes that routing decides already filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import fsum, prod
from typing import Any, NamedTuple, Protocol

from penteract.config.layout import Layout
from penteract.ops.declarations.traffic import Kernels
from penteract.ops.spec import Spec, Widths
from penteract.ops.tape import Site
from penteract.units import Bytes, Flops, Seconds

Specs = tuple[Spec, ...]
Shape = tuple[int, ...]
Attrs = Mapping[str, Any]
Registers = Callable[[], Sequence[Bytes]]

BOOL = 1  # bytes of an element of a mask
FLOAT = 4  # bytes of a scale, or of a sum that a kernel keeps


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


class CallShapes(NamedTuple):
    """One call of an op, as numbers."""

    phase: str
    ins: Sequence[Shape]
    weights: Sequence[Shape]
    attrs: Attrs


class WorkRates(Protocol):
    """Seconds of the kinds of work that a device does, as `readings/costs/rates.py` knows them."""

    def product(self, p: Product) -> Seconds:
        """Seconds of one batch of matrix products, as one kernel."""
        ...

    def scaled(self, p: Product) -> Seconds:
        """Seconds of one batch of matrix products of FP8 codes."""
        ...

    def attention(
        self, products_flops: Flops, *, backward: bool, causal: bool, head_size: int = 128, flash: bool = False
    ) -> Seconds:
        """Seconds of fused attention whose products, masked scores too, are `products_flops`; a causal mask spares
        half."""
        ...

    def moved(self, amount: Bytes, walked: int = 0) -> Seconds:
        """Seconds of a pointwise kernel that reads and writes `amount` bytes; `walked`: elements that it takes one by
        one."""
        ...


class OpDeclaration:
    """The declaration of one op, and of its reference implementation. Another implementation is a subclass that changes
    what is said of implementations alone (`registry.py`).

    Names of what is kept: in0, in1, … out0, … extra0, …
    """

    # ---- of the op: the same for every implementation ----------------------------------------------------------------

    part = "compute"  # under which the time of its products is told
    differentiable: tuple[int, ...] = (0,)  # ins that get a gradient
    input_keeps: tuple[str, ...] = ()
    weight_keeps: tuple[str, ...] = ()
    deferrable = False  # may the weight gradient run at any later time
    passes_gradient = False  # the input gradient of every differentiable in *is* the gradient of out0
    forks = False  # its first in has another reader, whose gradient is the last that the input gradient reads
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
        """FLOPs of a phase: 2·m·n·k of each matrix product; kernels without products count as none."""
        return sum(2 * p.times * p.m * p.n * p.k for p in self.products(phase, ins, weights, attrs))

    # ---- of an implementation ----------------------------------------------------------------------------------------

    def agreed(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[str, int]:
        """(axis, n): a declaration that asks the ranks of an axis for the largest of n fp32 numbers before it
        computes."""
        return "", 0

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Bytes that are allocated at the worst moment beside results, freed on return."""
        return 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels | None:
        """The kernels of a phase without products. None: one, that reads and writes each register once, what it
        overwrites and what it needs beside registers twice."""
        return None

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        """Of one call: under which part of a step it is told ("compute", "attention" or "pointwise"), and its seconds.

        Products are at the speed of their shape, kernels at that of memory. Beside products, what is needed beside
        registers is written and read once, and a weight gradient is added to what is there.

        `registers`: tells the bytes of each that it reads or writes.
        """
        products = self.products(*call)
        if not products and (kernels := self.traffic(*call, widths)) is not None:
            return "pointwise", fsum([k.times * rates.moved(k.moved, k.walked) for k in kernels])
        beside = 2 * self.workspace(*call, widths)
        if call.phase == "weight_gradient":
            beside += 2 * sum(map(prod, call.weights)) * widths["gradient"]
        if products:
            return self.part, fsum(map(rates.product, products)) + (rates.moved(beside) if beside else 0.0)
        told = registers()
        return "pointwise", rates.moved(sum(told) + sum([told[i] for i in self.overwrites]) + beside)


Serves = Callable[
    [Site, Layout], OpDeclaration | None
]  # an implementation's declaration where it serves; None elsewhere


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
