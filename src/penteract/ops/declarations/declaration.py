"""What an op declares: its results, what each gradient keeps, FLOPs. And what an implementation of it declares:
workspace, values agreed on between ranks, cost.

FLOPs are those of matrix products (2·m·n·k each); everything else is bytes moved. `flops`, `workspace`, `traffic` and
`cost` get shapes as plain numbers; sizes that depend on routing are already filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum, prod
from typing import Any, Literal, NamedTuple, Protocol

from penteract.config.layout import Layout
from penteract.ops.declarations.traffic import Kernels
from penteract.ops.spec import Spec, Widths
from penteract.ops.tape import Site
from penteract.units import Bytes, Flops, Seconds

Specs = tuple[Spec, ...]
Shape = tuple[int, ...]
Attrs = Mapping[str, Any]
FusedKernel = Literal["cudnn", "flash", "fa4"]  # kernels of attention whose rates were measured
# What has a scale in a product of FP8 values: tensors or their rows; blocks, which are squares of a weight; blocks of
# tokens, over which a weight gradient sums.
ScaledBy = Literal["tensors", "blocks", "blocks of tokens"]
Registers = Callable[[], Sequence[Bytes]]

BOOL = 1  # bytes of an element of a mask
FLOAT = 4  # bytes of a scale, or of a sum inside a kernel


class Product(NamedTuple):
    """`times` products [m, k]·[k, n] -> [m, n]."""

    times: int
    m: int
    n: int
    k: int


def linear_products(phase: str, rows: int, width: int, out: int) -> tuple[Product, ...]:
    """x [rows, width] times w [out, width], or one of its two gradients, which permute the same three sizes."""
    sizes = {"forward": (rows, out, width), "input_gradient": (rows, width, out), "weight_gradient": (out, width, rows)}
    return (Product(1, *sizes[phase]),)


def product_flops(products: Iterable[Product]) -> int:
    """FLOPs of matrix products: 2·m·n·k each."""
    return sum(2 * p.times * p.m * p.n * p.k for p in products)


class CallShapes(NamedTuple):
    """The shapes of one call of an op, as numbers. `adds`: whether a weight gradient is added to what its bucket has;
    else it is written there. `room`: of the registers that hold the ins, where these have room for more rows."""

    phase: str
    ins: Sequence[Shape]
    weights: Sequence[Shape]
    attrs: Attrs
    adds: bool = True
    room: Sequence[Shape] | None = None

    @property
    def held(self) -> tuple[str, Sequence[Shape], Sequence[Shape], Attrs]:
        """What `workspace` takes: registers, whatever is in them."""
        return self.phase, self.room or self.ins, self.weights, self.attrs

    @property
    def of_op(self) -> tuple[str, Sequence[Shape], Sequence[Shape], Attrs]:
        """What `products` and `traffic` take."""
        return self[:4]

    def in_bucket(self, widths: Widths) -> Bytes:
        """Bytes of a bucket that a weight gradient with products writes; those that it reads where it adds, too."""
        return (1 + self.adds) * sum(map(prod, self.weights)) * widths["gradient"]


class WorkRates(Protocol):
    """Seconds of each kind of work on a device; `readings/costs/rates.py` implements it."""

    def product(self, p: Product) -> Seconds:
        """Seconds of one batch of matrix products, as one kernel."""
        ...

    def scaled(self, p: Product, by: ScaledBy = "tensors") -> Seconds:
        """Seconds of one batch of FP8 matrix products. `by`: what has a scale."""
        ...

    def attention(
        self,
        products_flops: Flops,
        elements: int,
        *,
        backward: bool,
        causal: bool,
        head_size: int = 128,
        kernel: FusedKernel = "cudnn",
    ) -> Seconds:
        """Seconds of fused attention. `products_flops`: of its products, masked scores included; a causal mask saves
        half of them. `elements`: of its queries."""
        ...

    def moved(self, amount: Bytes, walked: int = 0) -> Seconds:
        """Seconds of a pointwise kernel that reads and writes `amount` bytes. `walked`: elements that it addresses or
        converts one by one."""
        ...


class OpDeclaration:
    """The declaration of one op, and of its reference implementation. Another implementation is a subclass that
    overrides only the members of an implementation (`registry.py`).

    Names of kept values: in0, in1, … out0, … extra0, …
    """

    # ---- of the op: the same for every implementation ----------------------------------------------------------------

    part = "compute"  # the part of a step under which the time of its products is reported
    differentiable: tuple[int, ...] = (0,)  # ins that get a gradient
    input_keeps: tuple[str, ...] = ()
    weight_keeps: tuple[str, ...] = ()
    deferrable = False  # whether the weight gradient may run at any later time
    passes_gradient = False  # the input gradient of every differentiable in *is* the gradient of out0
    forks = False  # its first in has another reader, whose gradient is the last that the input gradient reads
    overwrites: tuple[int, ...] = ()  # ins that forward overwrites with its results: no other op may need them

    def results(self, ins: Sequence[Spec], weights: Sequence[Shape], attrs: Attrs) -> tuple[Specs, Specs]:
        """-> results, extras"""
        return (ins[0],), ()

    def gradients(self, attrs: Attrs) -> tuple[int, ...]:
        """The outs whose gradients the input gradient reads."""
        return (0,)

    def carry(self, ins: Sequence[Spec], attrs: Attrs) -> Specs:
        """Specs of what the input gradient passes to the weight gradient; empty: the gradients of the outs."""
        return ()

    def products(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[Product, ...]:
        """The matrix products of a phase."""
        return ()

    def flops(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> int:
        """FLOPs of a phase: 2·m·n·k for each matrix product, nothing for other kernels."""
        return product_flops(self.products(phase, ins, weights, attrs))

    # ---- of an implementation ----------------------------------------------------------------------------------------

    # Whether it finds out on the device how many rows of padded registers came, and moves no others.
    counts_rows = False

    def all_reduced_max(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs
    ) -> tuple[str, int]:
        """(axis, n): before it computes, the ranks of `axis` all-reduce the maximum of n fp32 numbers. ("", 0):
        none."""
        return "", 0

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> int:
        """Peak bytes that are allocated in addition to the results, and freed on return."""
        return 0

    def traffic(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Kernels | None:
        """The kernels of a phase without products. None: one kernel, which accesses each register once, and those that
        it overwrites and its workspace twice."""
        return None

    def timed_products(self, call: CallShapes) -> tuple[Product, ...]:
        """The products whose time its kernel takes, with the FLOPs of the op's: other than those where one kernel
        makes all of them."""
        return self.products(*call.of_op)

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        """-> the part of a step under which one call is reported ("compute", "attention" or "pointwise"), and its
        seconds.

        Products take the time of their shape, other kernels that of their memory traffic. A call with products also
        writes and reads its workspace once, and writes its weight gradient into the bucket or adds it there.

        `registers`: returns the bytes of each register that it reads or writes.
        """
        products = self.timed_products(call)
        if not products and (kernels := self.traffic(*call.of_op, widths)) is not None:
            return "pointwise", fsum([k.times * rates.moved(k.moved, k.walked) for k in kernels])
        extra = 2 * self.workspace(*call.held, widths)
        if call.phase == "weight_gradient":
            extra += call.in_bucket(widths)
        if products:
            return self.part, fsum(map(rates.product, products)) + (rates.moved(extra) if extra else 0.0)
        sizes = registers()
        return "pointwise", rates.moved(sum(sizes) + sum([sizes[i] for i in self.overwrites]) + extra)


Serves = Callable[
    [Site, Layout], OpDeclaration | None
]  # the declaration of an implementation that serves the site; None if it does not


def mixed(widths: Widths) -> bool:
    """Whether statistics have another dtype than activations."""
    return widths["compute"] != widths["stat"]


def widened(elements: int, widths: Widths) -> int:
    """Bytes of activations copied to the dtype of statistics; 0 if they already have it."""
    return elements * widths["stat"] if mixed(widths) else 0


def narrow_product(elements: int, widths: Widths) -> int:
    """Bytes of a weight gradient computed outside its bucket because the bucket has another dtype than the factors."""
    return elements * widths["compute"] if widths["gradient"] != widths["compute"] else 0


def wide_product(elements: int, widths: Widths) -> int:
    """The same for factors in the dtype of statistics."""
    return elements * widths["stat"] if widths["gradient"] != widths["stat"] else 0
