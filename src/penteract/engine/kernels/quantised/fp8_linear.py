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
from functools import partial
from typing import Any

import torch

from penteract.config.precision.fp8 import Format, Fp8
from penteract.config.precision.sampled_rows import EVERY, MARGIN, is_long, samples_gradients
from penteract.engine.dtypes import FORMATS
from penteract.engine.kernels.fusions import Rotate, put_swiglu, put_swiglu_input, rotate_
from penteract.engine.kernels.kernel import Bindable, Bound, Env, Tensors, TorchKernel, bound, in_turn
from penteract.engine.kernels.quantised.casters import Caster, Casters, Fp8Data, PutLargest, Slopes, typed
from penteract.engine.kernels.quantised.fp8 import Product, emulated, real
from penteract.engine.kernels.quantised.quantise import Operand, make_scales, round_into
from penteract.ops.declarations.fusions import columns
from penteract.ops.declarations.quantised.fp8 import knows_weights, rows_at_once
from penteract.ops.declarations.quantised.fp8_linear import POSITIONS, rows_of_room
from penteract.ops.tape import Site

# ---- plain torch -----------------------------------------------------------------------------------------------------


def put_largest(x: torch.Tensor, largest: torch.Tensor) -> None:
    """A NaN is the largest of all."""
    torch.maximum(largest, torch.linalg.vector_norm(x, torch.inf), out=largest)


def put_fp8(
    fp8: Fp8, name: Format, x: torch.Tensor, scale: torch.Tensor, largest: torch.Tensor | None, into: Fp8Data
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
                round_into(target, values, name)


def _made(x: Slopes) -> torch.Tensor:
    made = torch.empty_like(x.packed)
    put_swiglu_input(*x, made)
    return made


def put_largest_slope(x: Slopes, largest: torch.Tensor) -> None:
    """Of the gradients, which are made for this."""
    put_largest(_made(x), largest)


def put_slopes(
    fp8: Fp8, name: Format, x: Slopes, scale: torch.Tensor, largest: torch.Tensor | None, into: Fp8Data
) -> None:
    """FP8 data of the gradients, which are made again."""
    put_fp8(fp8, name, _made(x), scale, largest, into)


def put_sampled_slopes(
    fp8: Fp8, name: Format, x: Slopes, scale: torch.Tensor, zeros: torch.Tensor, into: Fp8Data
) -> None:
    """The same by the largest of some rows, or of all where that is too small. They are made once."""
    made, (largest, found) = _made(x), zeros.split(1)
    put_largest(made[::EVERY], largest)
    put_largest(made, found)
    largest.mul_(MARGIN).clamp_(max=torch.finfo(torch.float32).max)
    torch.where(found <= largest, largest, found, out=largest)  # a NaN is not
    put_fp8(fp8, name, made, scale, largest, into)


def put_glu(packed: torch.Tensor, out: torch.Tensor, largest: torch.Tensor) -> None:
    """SwiGLU of `packed` [.., 2·F] -> `out` [.., F], and its largest absolute value -> `largest` [1]; two kernels."""
    put_swiglu(packed, out)
    put_largest(out, largest)


TORCH = Casters(
    Caster(partial(partial, put_largest), partial(partial, put_fp8)),
    Caster(partial(partial, put_largest_slope), partial(partial, put_slopes)), partial(partial, put_sampled_slopes),
    put_glu,
    lambda parts: parts[0] if len(parts) == 1 else None,
)  # fmt: skip


# ---- phases ----------------------------------------------------------------------------------------------------------


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, x.shape[-1])  # never a copy: a bound call would keep it


@dataclass(frozen=True, slots=True)
class Fp8Kernels:
    """`quantise` and the three phases of `fp8_linear` and `fp8_glu`. Each gives what makes its call: views of registers
    and weights are made once, what is temporary in each call."""

    casters: Casters
    product: Product
    rotate: Rotate = rotate_

    def quantise(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
        """FP8 data of x, and its scale; its largest value may be known."""
        fp8: Fp8 = site.attrs["fp8"]
        rowwise, columnwise, scale = outs
        into = Fp8Data(typed(_flat(rowwise), fp8.operand), typed(columnwise, fp8.operand))
        own_largest = ins[1] if len(ins) > 1 else None
        cast = self._cast(env, fp8, fp8.operand, [_flat(ins[0])], scale, own_largest=own_largest)
        return partial(cast, [into])

    def forward(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
        """x·wᵀ of all weights; heads are rotated by position."""
        out, scale = outs
        product = self._product(env, site, ins, weights, out, scale)
        return in_turn(product, *[bound(self.rotate, env, site, out, at, 1) for at in ins[POSITIONS:]])

    def glu_forward(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
        """Gate and up, side by side; their SwiGLU, and its largest value."""
        out, largest, scale, packed = outs
        product = self._product(env, site, ins, weights, packed, scale)
        return in_turn(product, largest.zero_, bound(self.casters.put_glu, _flat(packed), _flat(out), largest))

    def input_gradient(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
        """g·w of all weights; the columnwise data of g for the weight gradient. The largest value of g may be known."""
        of_weights, g, *largest = ins
        values = self.casters.of_values
        return self._input_gradient(env, site, values, _flat(g), of_weights, weights, outs, *largest)

    def glu_input_gradient(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> Bound:
        """The same, of the gradients of gate and up."""
        of_weights, packed, g = ins
        slopes = Slopes(_flat(packed), _flat(g))
        return self._input_gradient(env, site, self.casters.of_slopes, slopes, of_weights, weights, outs)

    def _product(
        self, env: Env, site: Site, ins: Tensors, weights: Tensors, out: torch.Tensor, scale: torch.Tensor
    ) -> Bound:
        fp8: Fp8 = site.attrs["fp8"]
        a, matrices, rows = _operand(_flat(ins[1]), fp8.operand, ins[3]), self._matrices(weights), _flat(out)
        shape = site.attrs["features"], a.data.shape[1]
        room = partial(torch.empty, shape, dtype=FORMATS[fp8.operand], device=out.device)
        kept = env.largest_weights[site.params[0]] if knows_weights(site) else None
        cast = self._cast(env, fp8, fp8.operand, matrices, scale, own_largest=kept)

        def run() -> None:
            made = room()
            cast(_each(matrices, Fp8Data(made, None)))
            self.product(fp8, a, Operand(made, scale), rows, True)

        return run

    def _input_gradient(  # noqa: PLR0913 (two ops share it)
        self, env: Env, site: Site, caster: Caster, g: Any, of_weights: torch.Tensor, weights: Tensors, outs: Tensors,
        largest: torch.Tensor | None = None,
    ) -> Bound:  # fmt: skip
        fp8: Fp8 = site.attrs["fp8"]
        out, columnwise, of_g = outs
        matrices, rows = self._matrices(weights), _flat(out)
        columnwise = typed(columnwise, fp8.gradient)
        features, tokens = columnwise.shape
        room = partial(torch.empty, device=out.device)
        cast = self._gradient_cast(env, fp8, g, tokens, of_g, caster, largest)
        puts = [self.casters.of_values.fp8_of(fp8, fp8.operand, part, of_weights) for part in matrices]

        def run() -> None:
            data = room(tokens, features, dtype=columnwise.dtype)
            cast([Fp8Data(data, columnwise)])
            made = room(rows.shape[1], features, dtype=FORMATS[fp8.operand])
            for put, into in zip(puts, _each(matrices, Fp8Data(None, made)), strict=True):
                put(None, into)
            self.product(fp8, Operand(data, of_g), Operand(made, of_weights), rows, False)

        return run

    def weight_gradient(self, env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> Bound:
        """gᵀ·x into each bucket; added to what is there some rows at a time, as no product of data adds."""
        fp8: Fp8 = site.attrs["fp8"]
        x, of_x, g, of_g = ins
        parts, width = self._matrices(into), x.shape[0]
        n = rows_of_room(site.attrs["features"], width)
        room = partial(torch.empty, n, width, dtype=parts[0].dtype, device=x.device)
        a, b = _operand(g, fp8.gradient, of_g), _operand(x, fp8.operand, of_x)
        slices = [
            (Operand(a.data[at : min(at + some, end)], of_g), part[at - begin : at - begin + some])
            for (begin, end), part in zip(columns([len(w) for w in parts]), parts, strict=True)
            for some in [n if add else end - begin]
            for at in range(begin, end, some)
        ]

        def run() -> None:
            held = room()
            for rows, part in slices:
                made = held[: len(part)] if add else part
                self.product(fp8, rows, b, made, False)
                if add:
                    part.add_(made)

        return run

    def _matrices(self, several: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As few as they are in memory."""
        whole = self.casters.whole(several)
        return list(several) if whole is None else [whole]

    def _cast(
        self, env: Env, fp8: Fp8, name: Format, parts: Sequence[Any], scale: torch.Tensor,
        caster: Caster | None = None, own_largest: torch.Tensor | None = None,
    ) -> Callable[[Sequence[Fp8Data]], None]:  # fmt: skip
        """What puts FP8 data of tensors that share a scale into places, once ranks have agreed on it. `own_largest`:
        this rank's largest value, where what made the tensors has found it."""
        caster = caster or self.casters.of_values
        finds = [caster.largest_of(part) for part in parts] if own_largest is None else [_put_known(own_largest)]
        puts = [caster.fp8_of(fp8, name, part, scale) for part in parts]
        shared = len(env.mesh.group("sequence", env.rank)) > 1
        direct = None if shared or caster.overwrites else own_largest

        def run(into: Sequence[Fp8Data]) -> None:
            largest = direct
            if largest is None:
                largest = env.zeros.next()
                for find in finds:
                    find(largest)
            if shared:
                env.all_reduce_max("sequence", largest)
            for put, data in zip(puts, into, strict=True):
                put(largest, data)
                largest = None  # the first has made the scale

        return run

    def _gradient_cast(
        self, env: Env, fp8: Fp8, g: Any, rows: int, scale: torch.Tensor, caster: Caster,
        own_largest: torch.Tensor | None,
    ) -> Callable[[Sequence[Fp8Data]], object]:  # fmt: skip
        """The same for a gradient of so many rows; of gate and up in one pass, where some rows make the scale."""
        if isinstance(g, Slopes) and is_long(rows) and samples_gradients(fp8, env.mesh.layout):
            put = self.casters.sampled_slopes(fp8, fp8.gradient, g, scale)
            return lambda into: put(env.zeros.pair(), *into)
        return self._cast(env, fp8, fp8.gradient, [g], scale, caster, own_largest)

    def table(self) -> dict[str, TorchKernel]:
        """The kernels of the ops that are cast once, by op name."""
        return {
            "quantise": TorchKernel(Bindable(self.quantise)),
            "fp8_linear": TorchKernel(*map(Bindable, (self.forward, self.input_gradient, self.weight_gradient))),
            "fp8_glu": TorchKernel(*map(Bindable, (self.glu_forward, self.glu_input_gradient, self.weight_gradient))),
        }


def _each(parts: Sequence[torch.Tensor], into: Fp8Data) -> list[Fp8Data]:
    """Where the data of matrices go that lie one below the other."""
    return [into] if len(parts) == 1 else [into.part(*at) for at in columns([len(w) for w in parts])]


def _put_known(own_largest: torch.Tensor) -> PutLargest:
    return lambda largest: largest.copy_(own_largest)


def _operand(data: torch.Tensor, name: Format, scale: torch.Tensor) -> Operand:
    return Operand(typed(data, name), scale)


EMULATED = Fp8Kernels(TORCH, emulated).table()
FP8 = Fp8Kernels(TORCH, real).table()
