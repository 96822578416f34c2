"""Experts' matrices in FP8: which scales, which codes. What multiplies them is given.

x [R, D] by expert, w [X, F, D], g [R, F]; of expert e with the rows r:

    forward          x[r]   w[e]     sums over D
    input_gradient   g[r]   w[e]ᵀ    sums over F

Every scale is of one token's features or of one expert's matrix. The weights' gradients sum over the tokens that meet
on a rank, and are those of `experts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from penteract.config.precision.fp8 import Fp8
from penteract.engine.kernels.experts import Splits, each_expert, expert_linear_weight
from penteract.engine.kernels.fp8 import Product, emulated, real
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.engine.kernels.quantise import TORCH, Look, Operand, Quantiser, scale_count
from penteract.ops.declarations.fp8 import aligned, sum_is_cut
from penteract.ops.tape import Site

_ROWS, _MATRIX = range(2)
FOUR = 4  # cuBLASLt reads scales of blocks 16 bytes at a time: they are of so many rows, or a multiple


@dataclass(frozen=True, slots=True)
class ScaledExperts:
    """Two phases, over what makes codes and what multiplies them.

    `multiple`: of rows with scales of blocks, as many as the product takes well. An expert's last few may then be the
    first of those that follow, whose own product comes later and writes over them.
    """

    product: Product
    quantiser: Quantiser
    multiple: int = 1

    def forward(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """Rows times their expert's matrix, of quantised operands."""
        x, splits = ins
        look = Look(_ROWS, x, site.attrs["fp8"].operand)
        self._multiply(_Job(env, site, "forward", splits), look, weights[0], outs[0])

    def input_gradient(self, env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        """The gradient of the rows, of quantised operands."""
        splits, g = ins
        look = Look(_ROWS, g, site.attrs["fp8"].gradient)
        self._multiply(_Job(env, site, "input_gradient", splits), look, weights[0].transpose(1, 2), outs[0])

    def _multiply(self, job: _Job, a: Look, w: torch.Tensor, out: torch.Tensor) -> None:
        """w [X, n, k]. Ranks that share a sum agree on all scales at once, before any code is made."""
        fp8, how, busy = job.fp8, self.quantiser, job.busy
        if not busy:
            return
        looks = [Look(_MATRIX, matrix, fp8.operand, square=True) for matrix in w]
        count, each = scale_count(fp8, a), scale_count(fp8, looks[0])
        begin = aligned(count)
        scales = torch.zeros(begin + len(looks) * each, dtype=torch.float32, device=out.device)
        of_rows, of_matrices = scales[:count], scales[begin:].view(len(looks), each)
        how.put_largest(fp8, a, of_rows)
        for e in busy:
            how.put_largest(fp8, looks[e], of_matrices[e])
        if fp8.kind == "rowwise" and sum_is_cut(job.phase, job.site.attrs):
            job.env.agree("tp", scales)
        every = how.quantised(fp8, a, of_rows)
        for e, rows in busy.items():
            self._one(job, every, rows, (looks[e], of_matrices[e]), out)

    def _one(
        self, job: _Job, every: Operand, rows: slice, matrix: tuple[Look, torch.Tensor], out: torch.Tensor
    ) -> None:
        b = self.quantiser.quantised(job.fp8, *matrix)
        if job.fp8.kind == "blockwise":
            whole = -(-(rows.stop - rows.start) // self.multiple) * self.multiple
            rows = slice(rows.start, min(rows.start + whole, len(out)))
        scale = every.scale[..., rows].clone(memory_format=torch.contiguous_format)  # where kernels want it to begin
        self.product(job.fp8, Operand(every.codes[rows], scale), b, out[rows], job.phase == "forward")


@dataclass(frozen=True, slots=True)
class _Job:
    """One call."""

    env: Env
    site: Site
    phase: str
    splits: Splits

    @property
    def fp8(self) -> Fp8:
        return self.site.attrs["fp8"]

    @property
    def busy(self) -> dict[int, slice]:
        """Experts that have rows, in the order of these."""
        return {e: rows for e, rows in each_expert(self.splits) if rows.stop > rows.start}


def in_fours(product: Product) -> Product:
    """The product, of as many rows as there are: where these are not in fours and scales are of blocks, the last few
    by themselves, filled up with zeros."""

    def run(fp8: Fp8, a: Operand, b: Operand, out: torch.Tensor, forward: bool) -> None:
        rows = len(out)
        begin = rows - rows % FOUR
        if fp8.kind != "blockwise" or begin == rows:
            product(fp8, a, b, out, forward)
            return
        if begin:
            most = Operand(a.codes[:begin], a.scale[:, :begin].contiguous())
            product(fp8, most, b, out[:begin], forward)
        more = FOUR - rows % FOUR
        codes = pad(a.codes[begin:].view(torch.uint8), (0, 0, 0, more)).view(a.codes.dtype)
        made = out.new_empty(FOUR, out.shape[1])
        product(fp8, Operand(codes, pad(a.scale[:, begin:], (0, more))), b, made, forward)
        out[begin:].copy_(made[:-more])

    return run


def scaled_experts(product: Product, quantiser: Quantiser = TORCH, *, multiple: int = 1) -> TorchKernel:
    """The kernel, over what multiplies and what makes codes."""
    how = ScaledExperts(product, quantiser, multiple)
    return TorchKernel(how.forward, how.input_gradient, expert_linear_weight)


EMULATED = {"expert_linear": scaled_experts(emulated)}
FP8 = {"expert_linear": scaled_experts(in_fours(real), multiple=FOUR)}
