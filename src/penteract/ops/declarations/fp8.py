"""Declaration of linears whose products are of FP8 codes: what `linear` keeps, and codes and scales beside it.

A product out [m, n] = a [m, k] · b [n, k]ᵀ takes two operands, each with codes that lie along k. Both are quantised
anew in every phase: of x and g along features in one phase, along tokens in the other. A weight that was gathered as
codes is read as it came, and for the input gradient put along k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import fsum, prod

from penteract.config.layout import Elementwise, Layout
from penteract.config.precision.fp8 import UNIT, Fp8
from penteract.errors import BadInput
from penteract.ops.declarations.declaration import (
    FLOAT,
    Attrs,
    CallShapes,
    OpDeclaration,
    Registers,
    Serves,
    Shape,
    WorkRates,
)
from penteract.ops.declarations.dense import Linear
from penteract.ops.spec import Widths
from penteract.ops.tape import Site
from penteract.units import Bytes, Seconds

CODE = 1  # bytes of a code
ALIGNED = 4  # scales: kernels want those of an operand to begin at a multiple of 16 bytes
LONE = ALIGNED * FLOAT  # bytes of the scale of a whole tensor, where it lies by itself
CHUNK = 2**22  # elements that are scaled at a time, in fp32: few enough to stay in a GPU's cache

Sizes = tuple[int, int, int]


def sizes(phase: str, ins: Sequence[Shape], weights: Sequence[Shape]) -> Sizes:
    """(m, n, k) of a phase's product; x [T, D], w [F, D], g [T, F]."""
    t, d, f = prod(ins[0][:-1]), ins[0][-1], weights[0][0]
    return {"forward": (t, f, d), "input_gradient": (t, d, f), "weight_gradient": (f, d, t)}[phase]


class ScaledLinear(Linear):
    """`linear` in FP8. `elementwise`: what makes the codes; kernels scale in registers, with no copy in fp32."""

    def __init__(self, fp8: Fp8, elementwise: Elementwise = "reference") -> None:
        """`fp8`: the recipe; `elementwise`: whether plain torch or GPU kernels make the codes."""
        self.fp8 = fp8
        self.elementwise: Elementwise = elementwise

    def scales(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape]) -> tuple[int, int]:
        """How many the two operands have, the first with what fills it up to ALIGNED."""
        first, second = self._counts(phase, ins, weights)
        return aligned(first), second

    def _counts(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape]) -> tuple[int, int]:
        """How many the two operands have. A weight in blocks is the second operand but for its own gradient."""
        (m, n, k), block = sizes(phase, ins, weights), self.fp8.block
        match self.fp8.kind:
            case "tensorwise" | "delayed":
                return 1, 0 if self._came(phase) else 1
            case "rowwise":
                return m, n
            case "blockwise":
                square = phase != "weight_gradient"
                return m * (k // block), (n // block if square else n) * (k // block)

    def _came(self, phase: str) -> bool:
        """Whether the second operand is a weight that came as codes, with its scale."""
        return self.fp8.gather and phase != "weight_gradient"

    def agreed(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs) -> tuple[str, int]:
        """A row that tp cuts is one of a weight's second dim, or of the gradient where it is the first. Tokens are cut
        over cp, and over tp too where the weight is whole."""
        both = sum(self.scales(phase, ins, weights))
        match self.fp8.kind:
            case "tensorwise":
                return "sequence", both
            case "rowwise" if phase == "weight_gradient":
                return ("sequence" if attrs["cut"] is None else "cp"), both
            case "rowwise" if sum_is_cut(phase, attrs):
                return "tp", both
            case _:
                return "", 0

    def workspace(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs, widths: Widths
    ) -> Bytes:
        """Scales and codes of both operands, and beside them what is scaled at the time, or the product."""
        (m, n, k), scales = sizes(phase, ins, weights), FLOAT * sum(self.scales(phase, ins, weights))
        if self.elementwise == "triton" and self.fp8.kind != "blockwise":  # beside the largest values, not in place
            scales += FLOAT * sum(self._counts(phase, ins, weights))
        a, b = m * k * CODE, n * k * CODE
        first = a + at_a_time(self.fp8, self.elementwise, (m, k), square=False)
        if self._came(phase):
            return scales + max(first, a + (0 if phase == "forward" else b))
        second = a + b + at_a_time(self.fp8, self.elementwise, (n, k), square=phase != "weight_gradient")
        product = a + b + (m * n * widths["compute"] if phase == "weight_gradient" else 0)
        bias = sum(prod(w) for w in weights[1:]) * widths["gradient"] if phase == "weight_gradient" else 0
        return max(scales + max(first, second, product), bias)

    def passes(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], widths: Widths) -> Bytes:
        """Each operand is read for its largest value and again for its codes, which are written. With delayed scales
        the largest values are looked at once: of x and w in forward, of g as it comes. Codes that came are moved where
        they lie along another dim. A kernel reads a block once for both."""
        m, n, k = sizes(phase, ins, weights)
        if self._came(phase):
            return m * k * (2 * widths["compute"] + CODE) + (0 if phase == "forward" else 2 * n * k * CODE)
        new = {"forward": m + n, "input_gradient": m, "weight_gradient": 0}[phase]
        one_reading = self.fp8.kind == "blockwise" and self.elementwise == "triton"
        looks = new if self.fp8.kind == "delayed" else 0 if one_reading else m + n
        return (looks + m + n) * k * widths["compute"] + (m + n) * k * CODE

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        """Products of codes, and the passes that make them. A weight gradient is made beside its bucket."""
        passes = self.passes(call.phase, call.ins, call.weights, widths)
        if call.phase == "weight_gradient":
            passes += 2 * prod(call.weights[0]) * (widths["gradient"] + widths["compute"])
        return self.part, fsum(map(rates.scaled, self.products(*call))) + rates.moved(passes)


def aligned(scales: int) -> int:
    """The count of scales rounded up to a multiple of `ALIGNED`."""
    return -(-scales // ALIGNED) * ALIGNED


def sum_is_cut(phase: str, attrs: Attrs) -> bool:
    """Whether tp cuts the dim along which a product with a weight sums: its second in forward, then its first."""
    return attrs["cut"] == (1 if phase == "forward" else 0)


def at_a_time(fp8: Fp8, elementwise: Elementwise, shape: tuple[int, int], *, square: bool) -> Bytes:
    """Of an operand [rows, k], what is scaled at a time in fp32; kernels scale in registers."""
    rows, k = shape
    return 0 if elementwise == "triton" else min(rows, rows_at_once(fp8, k, square=square)) * k * FLOAT


def rows_at_once(fp8: Fp8, k: int, *, square: bool) -> int:
    """Rows of k elements that are scaled at a time: whole blocks."""
    unit = fp8.block if square and fp8.kind == "blockwise" else 1
    return max(1, CHUNK // (k * unit)) * unit


def check_sizes(sites: Iterable[Site], pieces: int) -> None:
    """Refuse a linear whose sizes are not whole units of its recipe: blocks never straddle what ranks hold. The same of
    experts' matrices, of whose tokens there may be any number.

    `pieces`: runs of a sequence's tokens that a rank holds.
    """
    for site in sites:
        fp8: Fp8 | None = site.attrs.get("fp8")
        if fp8 is None:
            continue
        *several, f, d = site.weights[0]
        found = [("features in", d, fp8.unit), ("features out", f, fp8.unit)]
        if not several:
            t, *_ = sizes("forward", [s.shape for s in site.ins], site.weights)  # type: ignore[arg-type]
            run = fp8.unit * (pieces if fp8.kind == "blockwise" else 1)
            found.insert(0, ("tokens of a micro-batch on a rank", t, run))
        for what, n, unit in found:
            if n % unit:
                other = "fp8_tensorwise" if all(size % UNIT == 0 for _, size, _ in found) else "bf16"
                fix = "--precision.fp8_experts false" if several else f"--precision.dtype {other}"
                raise BadInput("FP8", f"{fp8.kind} FP8 takes sizes in whole units", where=site.params[0],
                               found=f"{n} {what}", allowed=f"multiples of {unit}",
                               fix=f"{fix}, or fewer ranks that cut it")  # fmt: skip


def fp8_state_bytes(site: Site) -> Bytes:
    """What is kept between steps for a linear: of x, w and g the largest of each step, of all of them, and of now; or
    the scale of a weight that is gathered as codes."""
    fp8: Fp8 | None = site.attrs.get("fp8")
    if fp8 and fp8.kind == "delayed":
        return 3 * (fp8.history + 2) * FLOAT
    return LONE if reads_quantised_weight(site) else 0


def reads_quantised_weight(site: Site) -> bool:
    """Whether a site reads its weight, the first of its parameters, as codes that were gathered."""
    fp8: Fp8 | None = site.attrs.get("fp8")
    return fp8 is not None and fp8.gather


def quantise_workspace(elements: int, elementwise: Elementwise = "reference") -> Bytes:
    """Of a shard that is made codes: some of it at a time, in fp32; none where a kernel does it."""
    return 0 if elementwise == "triton" else min(elements, CHUNK) * FLOAT


@cache
def scaled_linear(fp8: Fp8, elementwise: Elementwise = "reference") -> ScaledLinear:
    """The declaration for a recipe."""
    return ScaledLinear(fp8, elementwise)


def with_recipe(made: Callable[[Fp8, Elementwise], OpDeclaration], elementwise: Elementwise) -> Serves:
    """Where a linear has a recipe, and a layout makes codes so."""

    def serves(site: Site, layout: Layout) -> OpDeclaration | None:
        fp8: Fp8 | None = site.attrs.get("fp8")
        return made(fp8, elementwise) if fp8 is not None and layout.elementwise == elementwise else None

    return serves
