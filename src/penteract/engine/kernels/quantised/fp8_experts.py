"""Experts' linear layers in FP8: scaling and quantisation of operands. The product itself is a parameter.

x [R, D] by expert, w [X, F, D], g [R, F]; of expert e with the rows r:

    forward          x[r]   w[e]     sums over D
    input_gradient   g[r]   w[e]ᵀ    sums over F

Every scale belongs to one token's features or one expert's matrix. Weight gradients sum over the tokens on a rank, and
are those of `experts.py`, not in FP8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from penteract.config.precision.fp8 import Fp8
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.engine.kernels.moe.experts import Splits, each_expert, expert_linear_weight
from penteract.engine.kernels.quantised.fp8 import Product, emulated, real
from penteract.engine.kernels.quantised.quantise import TORCH, Operand, OperandView, Quantiser, scale_count
from penteract.ops.declarations.quantised.fp8 import aligned, sum_is_cut
from penteract.ops.tape import Site

_ROWS, _MATRIX = range(2)
FOUR = 4  # cuBLASLt reads scales of blocks 16 bytes at a time, so the number of rows must be a multiple of this


@dataclass(frozen=True, slots=True)
class ScaledExperts:
    """The two phases in FP8, with a given product and quantiser.

    `multiple`: with blockwise scales, an expert's number of rows is rounded up to a multiple of this. The extra rows
    belong to the next experts, whose own products come later and overwrite their results.
    """

    product: Product
    quantiser: Quantiser
    multiple: int = 1

    def forward(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """Rows times their expert's matrix, of quantised operands."""
        x, splits = ins
        view = OperandView(_ROWS, x, site.attrs["fp8"].operand)
        self._multiply(_ExpertCall(env, site, "forward", splits), view, weights[0], outs[0])

    def input_gradient(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """The gradient of the rows, of quantised operands."""
        splits, g = ins
        view = OperandView(_ROWS, g, site.attrs["fp8"].gradient)
        self._multiply(_ExpertCall(env, site, "input_gradient", splits), view, weights[0].transpose(1, 2), outs[0])

    def _multiply(self, call: _ExpertCall, a: OperandView, w: torch.Tensor, out: torch.Tensor) -> None:
        """w [X, n, k]. Ranks that share a sum agree on all scales at once, before anything is quantised."""
        fp8, quantiser, busy = call.fp8, self.quantiser, call.busy
        if not busy:
            return
        views = [OperandView(_MATRIX, matrix, fp8.operand, square=True) for matrix in w]
        count, each = scale_count(fp8, a), scale_count(fp8, views[0])
        begin = aligned(count)
        scales = torch.zeros(begin + len(views) * each, dtype=torch.float32, device=out.device)
        of_rows, of_matrices = scales[:count], scales[begin:].view(len(views), each)
        quantiser.put_largest(fp8, a, of_rows)
        for e in busy:
            quantiser.put_largest(fp8, views[e], of_matrices[e])
        if fp8.kind == "rowwise" and sum_is_cut(call.phase, call.site.attrs):
            call.env.all_reduce_max("tp", scales)
        every = quantiser.quantised(fp8, a, of_rows)
        for e, rows in busy.items():
            self._multiply_expert(call, every, rows, (views[e], of_matrices[e]), out)

    def _multiply_expert(
        self, call: _ExpertCall, every: Operand, rows: slice, matrix: tuple[OperandView, torch.Tensor],
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        b = self.quantiser.quantised(call.fp8, *matrix)
        if call.fp8.kind == "blockwise":
            whole = -(-(rows.stop - rows.start) // self.multiple) * self.multiple
            rows = slice(rows.start, min(rows.start + whole, len(out)))
        scale = every.scale[..., rows].clone(memory_format=torch.contiguous_format)  # aligned, as kernels need it
        self.product(call.fp8, Operand(every.data[rows], scale), b, out[rows], call.phase == "forward")


@dataclass(frozen=True, slots=True)
class _ExpertCall:
    """One call of a phase, for all experts of this rank."""

    env: Env
    site: Site
    phase: str
    splits: Splits

    @property
    def fp8(self) -> Fp8:
        return self.site.attrs["fp8"]

    @property
    def busy(self) -> dict[int, slice]:
        """Experts that have rows -> their rows, in order."""
        return {e: rows for e, rows in each_expert(self.splits) if rows.stop > rows.start}


def in_fours(product: Product) -> Product:
    """The product for any number of rows. With blockwise scales, the last rows beyond a multiple of four are multiplied
    separately, padded with zeros."""

    def run(fp8: Fp8, a: Operand, b: Operand, out: torch.Tensor, forward: bool) -> None:
        rows = len(out)
        begin = rows - rows % FOUR
        if fp8.kind != "blockwise" or begin == rows:
            product(fp8, a, b, out, forward)
            return
        if begin:
            whole = Operand(a.data[:begin], a.scale[:, :begin].contiguous())
            product(fp8, whole, b, out[:begin], forward)
        padding = FOUR - rows % FOUR
        tail = pad(a.data[begin:].view(torch.uint8), (0, 0, 0, padding)).view(a.data.dtype)
        made = out.new_empty(FOUR, out.shape[1])
        product(fp8, Operand(tail, pad(a.scale[:, begin:], (0, padding))), b, made, forward)
        out[begin:].copy_(made[:-padding])

    return run


def scaled_experts(product: Product, quantiser: Quantiser = TORCH, *, multiple: int = 1) -> TorchKernel:
    """The kernel with a given product and quantiser."""
    kernel = ScaledExperts(product, quantiser, multiple)
    return TorchKernel(kernel.forward, kernel.input_gradient, expert_linear_weight)


EMULATED = {"expert_linear": scaled_experts(emulated)}
FP8 = {"expert_linear": scaled_experts(in_fours(real), multiple=FOUR)}
