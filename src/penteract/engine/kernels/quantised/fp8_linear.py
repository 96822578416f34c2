"""Linear layers in FP8 whose operands are cast once: as declared in `ops/declarations/quantised/fp8_linear.py`.

x [T, D], w [F, D] of all weights, g [T, F]. In each product a · bᵀ both operands are contiguous along the sum:

    forward          x8  [T, D]     w8  [F, D]
    input_gradient   g8  [T, F]     w8ᵀ [D, F]
    weight_gradient  g8ᵀ [F, T]     x8ᵀ [D, T]

An FP8 value is the value times the inverse of its tensor's scale, in fp32, rounded. `Fp8Kernels` is given the casts and
the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from penteract.config.precision.fp8 import Format, Fp8
from penteract.engine.dtypes import FORMATS
from penteract.engine.kernels.fusions import Rotate, put_swiglu, put_swiglu_input, rotate_
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.engine.kernels.quantised.fp8 import Product, emulated, real
from penteract.engine.kernels.quantised.quantise import Operand, make_scales, round_into
from penteract.ops.declarations.fusions import columns
from penteract.ops.declarations.quantised.fp8 import rows_at_once
from penteract.ops.declarations.quantised.fp8_linear import POSITIONS, rows_of_room
from penteract.ops.tape import Site


class Fp8Data(NamedTuple):
    """Where the FP8 data of a tensor [rows, k] go, in Transformer Engine's terms: rowwise [rows, k]; columnwise
    [k, rows], the transpose. None: not needed."""

    rowwise: torch.Tensor | None
    columnwise: torch.Tensor | None

    def part(self, begin: int, end: int) -> Fp8Data:
        """The data of rows `begin` to `end`: views, rowwise [end - begin, k] and columnwise [k, end - begin]."""
        return Fp8Data(
            None if self.rowwise is None else self.rowwise[begin:end],
            None if self.columnwise is None else self.columnwise[:, begin:end],
        )


class Slopes(NamedTuple):
    """What the gradients of gate and up, side by side [T, 2·F], are made of: both of them so [T, 2·F], and the gradient
    of SwiGLU's result [T, F]."""

    packed: torch.Tensor
    gradient: torch.Tensor


Cast = tuple[Any, Fp8Data]  # a tensor [rows, k], or what it is made of; where its data go


class Caster(NamedTuple):
    """Casts tensors to FP8.

    put_largest  the largest absolute value of x [rows, k] and of what is in `largest` [1], into it
    put_fp8    the data of x; its scale [1] is made of `largest`, or known where that is None
    """

    put_largest: Callable[[Any, torch.Tensor], None]
    put_fp8: Callable[[Fp8, Format, Any, torch.Tensor | None, torch.Tensor, Fp8Data], None]


class Casters(NamedTuple):
    """All casts to FP8, and what is fused with them.

    of_values  data of tensors
    of_slopes  data of what `Slopes` make, with or without making it
    put_glu    SwiGLU of a packed tensor [T, 2·F], into [T, F]; its largest value too, and of what is in `largest`
    whole      several matrices as one, where they lie behind each other
    """

    of_values: Caster
    of_slopes: Caster
    put_glu: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    whole: Callable[[Sequence[torch.Tensor]], torch.Tensor | None]


# ---- plain torch -----------------------------------------------------------------------------------------------------


def put_largest(x: torch.Tensor, largest: torch.Tensor) -> None:
    """A NaN is the largest of all."""
    torch.maximum(largest, torch.linalg.vector_norm(x, torch.inf), out=largest)


def put_fp8(
    fp8: Fp8, name: Format, x: torch.Tensor, largest: torch.Tensor | None, scale: torch.Tensor, into: Fp8Data
) -> None:
    """Write x [rows, k] in FP8 format `name` `into` its data, some rows at a time in fp32, by `scale`; with `largest`
    (the largest absolute value), the scale is made from it first."""
    if largest is not None:
        make_scales(fp8, name, largest)
        scale.copy_(largest)
    rows, k = x.shape
    some = rows_at_once(fp8, k, square=False)
    inverse = torch.empty(1, dtype=torch.float32, device=x.device).copy_(scale).reciprocal_()
    wide = torch.empty(min(some, rows), k, dtype=torch.float32, device=x.device)
    for begin in range(0, rows, some):
        end = min(begin + some, rows)
        part, data = wide[: end - begin].copy_(x[begin:end]).mul_(inverse), into.part(begin, end)
        for target, values in ((data.rowwise, part), (data.columnwise, part.t())):
            if target is not None:
                round_into(target.view(FORMATS[name]), values, name)


def _made(x: Slopes) -> torch.Tensor:
    made = torch.empty_like(x.packed)
    put_swiglu_input(*x, made)
    return made


def put_largest_slope(x: Slopes, largest: torch.Tensor) -> None:
    """Of the gradients, which are made for this."""
    put_largest(_made(x), largest)


def put_slopes(
    fp8: Fp8, name: Format, x: Slopes, largest: torch.Tensor | None, scale: torch.Tensor, into: Fp8Data
) -> None:
    """FP8 data of the gradients, which are made again."""
    put_fp8(fp8, name, _made(x), largest, scale, into)


def put_glu(packed: torch.Tensor, out: torch.Tensor, largest: torch.Tensor) -> None:
    """SwiGLU of `packed` [.., 2·F] -> `out` [.., F], and its largest absolute value -> `largest` [1]; two kernels."""
    put_swiglu(packed, out)
    put_largest(out, largest)


TORCH = Casters(
    Caster(put_largest, put_fp8), Caster(put_largest_slope, put_slopes), put_glu,
    lambda parts: parts[0] if len(parts) == 1 else None,
)  # fmt: skip


# ---- phases ----------------------------------------------------------------------------------------------------------


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True, slots=True)
class Fp8Kernels:
    """`quantise` and the three phases of `fp8_linear` and `fp8_glu`."""

    casters: Casters
    product: Product
    rotate: Rotate = rotate_

    def quantise(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """FP8 data of x, and its scale; its largest value may be known."""
        fp8: Fp8 = site.attrs["fp8"]
        rowwise, columnwise, scale = outs
        cast = (_flat(ins[0]), Fp8Data(_flat(rowwise), columnwise))
        self._cast(env, fp8, fp8.operand, [cast], scale, own_largest=ins[1] if len(ins) > 1 else None)

    def forward(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """x·wᵀ of all weights; heads are rotated by position."""
        out, scale = outs
        self._product(env, site, ins, weights, out, scale)
        if len(ins) > POSITIONS:
            self.rotate(env, site, out, ins[POSITIONS], 1)

    def glu_forward(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """Gate and up, side by side; their SwiGLU, and its largest value."""
        out, largest, scale, packed = outs
        self._product(env, site, ins, weights, packed, scale)
        self.casters.put_glu(_flat(packed), _flat(out), largest.zero_())

    def input_gradient(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """g·w of all weights; the columnwise data of g for the weight gradient."""
        of_weights, g = ins
        self._input_gradient(env, site, self.casters.of_values, _flat(g), of_weights, weights, outs)

    def glu_input_gradient(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """The same, of the gradients of gate and up."""
        of_weights, packed, g = ins
        self._input_gradient(
            env, site, self.casters.of_slopes, Slopes(_flat(packed), _flat(g)), of_weights, weights, outs
        )

    def _product(
        self, env: Env, site: Site, ins: Tensors, weights: Tensors, out: torch.Tensor, scale: torch.Tensor
    ) -> None:
        fp8: Fp8 = site.attrs["fp8"]
        data, of_x = ins[1], ins[3]
        made = torch.empty(site.attrs["features"], data.shape[-1], dtype=torch.uint8, device=data.device)
        self._cast(env, fp8, fp8.operand, _each(self._matrices(weights), Fp8Data(made, None)), scale)
        a, b = _operand(_flat(data), fp8.operand, of_x), _operand(made, fp8.operand, scale)
        self.product(fp8, a, b, _flat(out), True)

    def _input_gradient(
        self, env: Env, site: Site, caster: Caster, g: Any, of_weights: torch.Tensor, weights: Tensors, outs: Tensors
    ) -> None:
        fp8: Fp8 = site.attrs["fp8"]
        out, columnwise, of_g = outs
        data = torch.empty(columnwise.shape[::-1], dtype=torch.uint8, device=columnwise.device)
        self._cast(env, fp8, fp8.gradient, [(g, Fp8Data(data, columnwise))], of_g, caster)
        made = torch.empty(out.shape[-1], data.shape[1], dtype=torch.uint8, device=columnwise.device)
        for part, into in _each(self._matrices(weights), Fp8Data(None, made)):
            self.casters.of_values.put_fp8(fp8, fp8.operand, part, None, of_weights, into)
        a, b = _operand(data, fp8.gradient, of_g), _operand(made, fp8.operand, of_weights)
        self.product(fp8, a, b, _flat(out), False)

    def weight_gradient(self, env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
        """gᵀ·x into each bucket; added to what is there some rows at a time, as no product of data adds."""
        fp8: Fp8 = site.attrs["fp8"]
        x, of_x, g, of_g = ins
        parts, width = self._matrices(into), x.shape[0]
        n = rows_of_room(site.attrs["features"], width)
        room = torch.empty(n, width, dtype=parts[0].dtype, device=x.device)
        b = _operand(x, fp8.operand, of_x)
        for (begin, end), part in zip(columns([len(w) for w in parts]), parts, strict=True):
            for at in range(begin, end, n if add else end - begin):
                to = min(at + n, end) if add else end
                made = room[: to - at] if add else part
                self.product(fp8, _operand(g[at:to], fp8.gradient, of_g), b, made, False)
                if add:
                    part[at - begin : to - begin].add_(made)

    def _matrices(self, several: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As few as they are in memory."""
        whole = self.casters.whole(several)
        return list(several) if whole is None else [whole]

    def _cast(
        self, env: Env, fp8: Fp8, name: Format, parts: Sequence[Cast], scale: torch.Tensor,
        caster: Caster | None = None, own_largest: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """FP8 data of tensors that share a scale, once ranks have agreed on it. `own_largest`: this rank's largest
        value, where what made the tensors has found it."""
        caster = caster or self.casters.of_values
        largest = torch.zeros(1, dtype=torch.float32, device=scale.device)
        if own_largest is not None:
            largest.copy_(own_largest)
        for part, _ in parts if own_largest is None else ():
            caster.put_largest(part, largest)
        env.all_reduce_max("sequence", largest)
        for i, (part, data) in enumerate(parts):
            caster.put_fp8(fp8, name, part, None if i else largest, scale, data)

    def table(self) -> dict[str, TorchKernel]:
        """The kernels of the ops that are cast once, by op name."""
        return {
            "quantise": TorchKernel(self.quantise),
            "fp8_linear": TorchKernel(self.forward, self.input_gradient, self.weight_gradient),
            "fp8_glu": TorchKernel(self.glu_forward, self.glu_input_gradient, self.weight_gradient),
        }


def _each(parts: Sequence[torch.Tensor], into: Fp8Data) -> list[Cast]:
    """Matrices one below the other, and where the data of each go."""
    return [(part, into.part(*at)) for at, part in zip(columns([len(w) for w in parts]), parts, strict=True)]


def _operand(data: torch.Tensor, name: Format, scale: torch.Tensor) -> Operand:
    return Operand(data.view(FORMATS[name]), scale)


EMULATED = Fp8Kernels(TORCH, emulated).table()
FP8 = Fp8Kernels(TORCH, real).table()
