"""Linear layers in FP8 whose operands are cast once: as declared in `ops/declarations/fp8_linear.py`.

x [T, D], w [F, D] of all weights, g [T, F]. Every product is a · bᵀ of operands whose codes lie along its sum:

    forward          x8  [T, D]     w8  [F, D]
    input_gradient   g8  [T, F]     w8ᵀ [D, F]
    weight_gradient  g8ᵀ [F, T]     x8ᵀ [D, T]

A code is a value times the inverse of its tensor's scale, in fp32, rounded. What casts and what multiplies is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from penteract.config.precision.fp8 import Format, Fp8
from penteract.engine.dtypes import FORMATS
from penteract.engine.kernels.fp8 import Product, emulated, real
from penteract.engine.kernels.fusions import Rotate, rotate_
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.engine.kernels.quantise import Operand, make_scales, round_into
from penteract.ops.declarations.fp8 import rows_at_once
from penteract.ops.declarations.fp8_linear import POSITIONS, rows_of_room
from penteract.ops.declarations.fusions import columns
from penteract.ops.tape import Site


class Codes(NamedTuple):
    """Where the codes of a tensor [rows, k] go: as they lie [rows, k], turned [k, rows]; None: not asked for."""

    straight: torch.Tensor | None
    turned: torch.Tensor | None

    def part(self, begin: int, end: int) -> Codes:
        """Those of some rows."""
        return Codes(
            None if self.straight is None else self.straight[begin:end],
            None if self.turned is None else self.turned[:, begin:end],
        )


class Caster(NamedTuple):
    """What makes codes.

    put_largest  the largest absolute value of x [rows, k] and of what is in `largest` [1], into it
    put_codes    the codes of x; its scale [1] is made of `largest`, or known where that is None
    whole        several matrices as one, where they lie behind each other
    """

    put_largest: Callable[[torch.Tensor, torch.Tensor], None]
    put_codes: Callable[[Fp8, Format, torch.Tensor, torch.Tensor | None, torch.Tensor, Codes], None]
    whole: Callable[[Sequence[torch.Tensor]], torch.Tensor | None]


# ---- plain torch -----------------------------------------------------------------------------------------------------


def put_largest(x: torch.Tensor, largest: torch.Tensor) -> None:
    """A NaN is the largest of all."""
    torch.maximum(largest, torch.linalg.vector_norm(x, torch.inf), out=largest)


def put_codes(
    fp8: Fp8, name: Format, x: torch.Tensor, largest: torch.Tensor | None, scale: torch.Tensor, into: Codes
) -> None:
    """Some rows at a time, in fp32."""
    if largest is not None:
        make_scales(fp8, name, largest)
        scale.copy_(largest)
    rows, k = x.shape
    some = rows_at_once(fp8, k, square=False)
    inverse = torch.empty(1, dtype=torch.float32, device=x.device).copy_(scale).reciprocal_()
    wide = torch.empty(min(some, rows), k, dtype=torch.float32, device=x.device)
    for begin in range(0, rows, some):
        end = min(begin + some, rows)
        part, codes = wide[: end - begin].copy_(x[begin:end]).mul_(inverse), into.part(begin, end)
        for target, values in ((codes.straight, part), (codes.turned, part.t())):
            if target is not None:
                round_into(target.view(FORMATS[name]), values, name)


TORCH = Caster(put_largest, put_codes, lambda parts: parts[0] if len(parts) == 1 else None)


# ---- phases ----------------------------------------------------------------------------------------------------------


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True, slots=True)
class Fp8Kernels:
    """`quantise` and the three phases of `fp8_linear`."""

    caster: Caster
    product: Product
    rotate: Rotate = rotate_

    def quantise(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """Codes of x, and its scale."""
        fp8: Fp8 = site.attrs["fp8"]
        codes, turned, scale = outs
        self._cast(env, fp8, fp8.operand, [_flat(ins[0])], scale, Codes(_flat(codes), turned))

    def forward(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """x·wᵀ of all weights; heads are turned by position."""
        fp8: Fp8 = site.attrs["fp8"]
        out, scale = outs
        _, codes, _, of_x, *positions = ins
        made = torch.empty(site.attrs["features"], codes.shape[-1], dtype=torch.uint8, device=codes.device)
        self._cast(env, fp8, fp8.operand, self._matrices(weights), scale, Codes(made, None))
        a, b = _operand(_flat(codes), fp8.operand, of_x), _operand(made, fp8.operand, scale)
        self.product(fp8, a, b, _flat(out), True)
        del made, a, b
        if positions:
            self.rotate(env, site, out, ins[POSITIONS], 1)

    def input_gradient(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """g·w of all weights; the codes of g, turned, for the weight gradient."""
        fp8: Fp8 = site.attrs["fp8"]
        of_weights, g = ins
        out, turned, of_g = outs
        rows = _flat(g)
        codes = torch.empty(rows.shape, dtype=torch.uint8, device=g.device)
        self._cast(env, fp8, fp8.gradient, [rows], of_g, Codes(codes, turned))
        made = torch.empty(out.shape[-1], rows.shape[1], dtype=torch.uint8, device=g.device)
        for part, into in _each(self._matrices(weights), Codes(None, made)):
            self.caster.put_codes(fp8, fp8.operand, part, None, of_weights, into)
        a, b = _operand(codes, fp8.gradient, of_g), _operand(made, fp8.operand, of_weights)
        self.product(fp8, a, b, _flat(out), False)

    def weight_gradient(self, env: Env, site: Site, ins: Tensors, into: Tensors, add: bool) -> None:
        """gᵀ·x into each bucket; added to what is there some rows at a time, as no product of codes adds."""
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
        whole = self.caster.whole(several)
        return list(several) if whole is None else [whole]

    def _cast(
        self, env: Env, fp8: Fp8, name: Format, parts: Sequence[torch.Tensor], scale: torch.Tensor, into: Codes
    ) -> None:
        """Codes of matrices that share a scale, once ranks have agreed on it."""
        largest = torch.zeros(1, dtype=torch.float32, device=scale.device)
        for part in parts:
            self.caster.put_largest(part, largest)
        env.agree("sequence", largest)
        first = True
        for part, codes in _each(parts, into):
            self.caster.put_codes(fp8, name, part, largest if first else None, scale, codes)
            first = False

    def table(self) -> dict[str, TorchKernel]:
        """By op."""
        return {
            "quantise": TorchKernel(self.quantise),
            "fp8_linear": TorchKernel(self.forward, self.input_gradient, self.weight_gradient),
        }


def _each(parts: Sequence[torch.Tensor], into: Codes) -> list[tuple[torch.Tensor, Codes]]:
    """Matrices one below the other, and where the codes of each go."""
    return [(part, into.part(*at)) for at, part in zip(columns([len(w) for w in parts]), parts, strict=True)]


def _operand(codes: torch.Tensor, name: Format, scale: torch.Tensor) -> Operand:
    return Operand(codes.view(FORMATS[name]), scale)


EMULATED = Fp8Kernels(TORCH, emulated).table()
FP8 = Fp8Kernels(TORCH, real).table()
