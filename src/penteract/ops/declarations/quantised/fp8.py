"""Declaration of linear layers in FP8: they keep what `linear` keeps, and take quantised data and scales as workspace.

A product out [m, n] = a [m, k] · b [n, k]ᵀ takes two operands, each contiguous along k. Both are quantised again in
every phase: x and g along features in one phase, along tokens in the other. A weight that was gathered in FP8 is read
as it is, and transposed for the input gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from math import fsum, prod
from types import MappingProxyType

from penteract.config.layout import Elementwise, Layout
from penteract.config.precision.fp8 import PRODUCT_MULTIPLE, Fp8
from penteract.errors import BadInput
from penteract.ops.declarations.declaration import (
    FLOAT,
    Attrs,
    CallShapes,
    OpDeclaration,
    Registers,
    ScaledBy,
    Serves,
    Shape,
    WorkRates,
)
from penteract.ops.declarations.dense import Linear
from penteract.ops.spec import Widths
from penteract.ops.tape import Site
from penteract.units import Bytes, Seconds

FP8_BYTES = 1  # of an element
ALIGNED = 4  # scales: kernels need those of an operand to begin at a multiple of 16 bytes
ONE_SCALE = ALIGNED * FLOAT  # bytes of the scale of a whole tensor, with padding
CHUNK = 2**22  # elements that are scaled at a time, in fp32: few enough to stay in a GPU's cache

# Of an op that casts once: of x; of the weights and of the gradient.
_CASTS: Mapping[str, int] = MappingProxyType({"quantise": 1, "fp8_linear": 2, "fp8_glu": 2})

Sizes = tuple[int, int, int]


def sizes(phase: str, ins: Sequence[Shape], weights: Sequence[Shape]) -> Sizes:
    """(m, n, k) of a phase's product; x [T, D], w [F, D], g [T, F]."""
    t, d, f = prod(ins[0][:-1]), ins[0][-1], weights[0][0]
    return {"forward": (t, f, d), "input_gradient": (t, d, f), "weight_gradient": (f, d, t)}[phase]


class ScaledLinear(Linear):
    """`linear` in FP8. `elementwise`: what quantises; Triton kernels scale in registers, without a copy in fp32."""

    def __init__(self, fp8: Fp8, elementwise: Elementwise = "reference") -> None:
        """`fp8`: the recipe; `elementwise`: whether plain torch or GPU kernels quantise."""
        self.fp8 = fp8
        self.elementwise: Elementwise = elementwise

    def scales(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape]) -> tuple[int, int]:
        """The number of scales of each operand; the first is padded to ALIGNED."""
        first, second = self._counts(phase, ins, weights)
        return aligned(first), second

    def _counts(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape]) -> tuple[int, int]:
        """The number of scales of each operand. The second is a weight in blocks, except for the weight gradient."""
        (m, n, k), block = sizes(phase, ins, weights), self.fp8.block
        match self.fp8.kind:
            case "tensorwise" | "delayed":
                return 1, 0 if self._gathered_in_fp8(phase) else 1
            case "rowwise":
                return m, n
            case "blockwise":
                square = phase != "weight_gradient"
                return m * (k // block), (n // block if square else n) * (k // block)

    def _gathered_in_fp8(self, phase: str) -> bool:
        """Whether the second operand is a weight that was gathered in FP8, with its scale."""
        return self.fp8.gather and phase != "weight_gradient"

    def all_reduced_max(
        self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], attrs: Attrs
    ) -> tuple[str, int]:
        """tp cuts rows of a weight's second dim, or rows of the gradient if it cuts the first. Tokens are cut over cp,
        and over tp too if the weight is not."""
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
        """Scales and quantised data of both operands; with them what is being scaled, or the product."""
        (m, n, k), scales = sizes(phase, ins, weights), FLOAT * sum(self.scales(phase, ins, weights))
        if self.elementwise == "triton" and self.fp8.kind != "blockwise":  # scales do not replace the largest values
            scales += FLOAT * sum(self._counts(phase, ins, weights))
        a, b = m * k * FP8_BYTES, n * k * FP8_BYTES
        first = a + at_a_time(self.fp8, self.elementwise, (m, k), square=False)
        if self._gathered_in_fp8(phase):
            return scales + max(first, a + (0 if phase == "forward" else b))
        second = a + b + at_a_time(self.fp8, self.elementwise, (n, k), square=phase != "weight_gradient")
        product = a + b + (m * n * widths["compute"] if phase == "weight_gradient" else 0)
        bias = sum(prod(w) for w in weights[1:]) * widths["gradient"] if phase == "weight_gradient" else 0
        return max(scales + max(first, second, product), bias)

    def passes(self, phase: str, ins: Sequence[Shape], weights: Sequence[Shape], widths: Widths) -> Bytes:
        """Bytes read and written to quantise. Each operand is read for its largest value, and again to write it in FP8.
        With delayed scales the largest values are found once: of x and w in forward, of g in the input gradient. A
        weight gathered in FP8 is only transposed, if need be. A kernel reads a block once for both."""
        m, n, k = sizes(phase, ins, weights)
        if self._gathered_in_fp8(phase):
            return m * k * (2 * widths["compute"] + FP8_BYTES) + (0 if phase == "forward" else 2 * n * k * FP8_BYTES)
        new = {"forward": m + n, "input_gradient": m, "weight_gradient": 0}[phase]
        one_pass = self.fp8.kind == "blockwise" and self.elementwise == "triton"
        amax_rows = new if self.fp8.kind == "delayed" else 0 if one_pass else m + n
        return (amax_rows + m + n) * k * widths["compute"] + (m + n) * k * FP8_BYTES

    def cost(self, rates: WorkRates, call: CallShapes, widths: Widths, registers: Registers) -> tuple[str, Seconds]:
        """FP8 products, and the passes that quantise. A weight gradient is computed outside its bucket, then
        copied or added."""
        passes = self.passes(call.phase, call.ins, call.weights, widths)
        if call.phase == "weight_gradient":
            made = 2 * prod(call.weights[0]) * widths["compute"]
            passes += made + call._replace(weights=call.weights[:1]).in_bucket(widths)
        scaled = partial(rates.scaled, by=scaled_by(self.fp8, call.phase))
        return self.part, fsum(map(scaled, self.products(*call.of_op))) + rates.moved(passes)


def scaled_by(fp8: Fp8, phase: str) -> ScaledBy:
    """What has a scale in the products of a phase."""
    if fp8.kind != "blockwise":
        return "tensors"
    return "blocks of tokens" if phase == "weight_gradient" else "blocks"


def aligned(scales: int) -> int:
    """The count of scales rounded up to a multiple of `ALIGNED`."""
    return -(-scales // ALIGNED) * ALIGNED


def sum_is_cut(phase: str, attrs: Attrs) -> bool:
    """Whether tp cuts the dim that a product with a weight sums over: its second in forward, its first in backward."""
    return attrs["cut"] == (1 if phase == "forward" else 0)


def at_a_time(fp8: Fp8, elementwise: Elementwise, shape: tuple[int, int], *, square: bool) -> Bytes:
    """Bytes of an operand [rows, k] that are scaled at a time in fp32; none with kernels, which scale in registers."""
    rows, k = shape
    return 0 if elementwise == "triton" else min(rows, rows_at_once(fp8, k, square=square)) * k * FLOAT


def rows_at_once(fp8: Fp8, k: int, *, square: bool) -> int:
    """Rows of k elements that are scaled at a time: whole blocks."""
    unit = fp8.block if square and fp8.kind == "blockwise" else 1
    return max(1, CHUNK // (k * unit)) * unit


def check_sizes(sites: Iterable[Site], chunks_per_sequence: int) -> None:
    """Refuse a linear layer whose sizes are not whole units of its recipe: no block may span two ranks. The same for
    experts' matrices, except that they take any number of tokens.

    `chunks_per_sequence`: how many chunks of consecutive tokens a rank has of a sequence.
    """
    for site in sites:
        fp8: Fp8 | None = site.attrs.get("fp8")
        if fp8 is None or not site.weights:
            continue
        *several, _, d = site.weights[0]
        found = [("features in", d, fp8.unit)]
        found += [("features out", w[-2], fp8.unit) for w in site.weights if len(w) > 1]
        if not several:
            t, *_ = sizes("forward", [s.shape for s in site.ins], site.weights)  # type: ignore[arg-type]
            run = fp8.unit * (chunks_per_sequence if fp8.kind == "blockwise" else 1)
            found.insert(0, ("tokens of a micro-batch on a rank", t, run))
        for what, n, unit in found:
            if n % unit:
                other = "fp8_tensorwise" if all(size % PRODUCT_MULTIPLE == 0 for _, size, _ in found) else "bf16"
                fix = "--precision.fp8_experts false" if several else f"--precision.dtype {other}"
                raise BadInput("FP8", f"{fp8.kind} FP8 takes sizes in whole units", where=site.params[0],
                               found=f"{n} {what}", allowed=f"multiples of {unit}",
                               fix=f"{fix}, or fewer ranks that cut it")  # fmt: skip


def fp8_state_bytes(site: Site) -> Bytes:
    """Bytes kept between steps for a linear layer: for each of x, w and g the largest values of every past step, of all
    of them, and of this step; or the scale of a weight that is gathered in FP8; or the largest value of its weights.
    Ops that cast once also have a place for the largest value of each cast."""
    if has_delayed_scales(site):
        return 3 * (site.attrs["fp8"].history + 2) * FLOAT
    kept = ONE_SCALE if reads_quantised_weight(site) or knows_weights(site) else 0
    return kept + ONE_SCALE * casts(site)


def casts(site: Site) -> int:
    """How many scales an op that casts once makes in forward and backward of a micro-batch. A rank has a place for the
    largest value of each, which micro-batches share, and recomputation too: a value is used within a call."""
    return _CASTS.get(site.op_name, 0)


def has_delayed_scales(site: Site) -> bool:
    """Whether the scales of a site come from past steps."""
    fp8: Fp8 | None = site.attrs.get("fp8")
    return fp8 is not None and fp8.kind == "delayed"


def knows_weights(site: Site) -> bool:
    """Whether the update finds the largest value of a site's weights."""
    return bool(site.attrs.get("known_weights"))


def reads_quantised_weight(site: Site) -> bool:
    """Whether a site reads its weight (the first of its parameters) as gathered in FP8."""
    fp8: Fp8 | None = site.attrs.get("fp8")
    return fp8 is not None and fp8.gather


def quantise_workspace(elements: int, elementwise: Elementwise = "reference") -> Bytes:
    """Bytes to quantise a shard: part of it at a time, in fp32; none with a kernel."""
    return 0 if elementwise == "triton" else min(elements, CHUNK) * FLOAT


@cache
def scaled_linear(fp8: Fp8, elementwise: Elementwise = "reference") -> ScaledLinear:
    """The declaration for a recipe."""
    return ScaledLinear(fp8, elementwise)


def with_recipe(made: Callable[[Fp8, Elementwise], OpDeclaration], elementwise: Elementwise) -> Serves:
    """Serves linear layers with a recipe, in layouts with this `elementwise`."""

    def serves(site: Site, layout: Layout) -> OpDeclaration | None:
        fp8: Fp8 | None = site.attrs.get("fp8")
        return made(fp8, elementwise) if fp8 is not None and layout.elementwise == elementwise else None

    return serves
