"""Gate and up projections whose product applies SwiGLU, and the way back: emulated products, and Triton's interpreter
for the rest, against the reference kernels."""

from __future__ import annotations

import pytest
import torch

from op_kernels.test_wide_product import Aten
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.engine.kernels.fused_glu import glus
from penteract.engine.kernels.glu import GLU
from penteract.engine.kernels.kernel import Env
from penteract.errors import Bug
from penteract.ops.tape import Site

SITE = Site("merged_glu", (), ())
ENV = Env(Mesh(Layout()), 0, torch.float32)


class Emulated:
    """As quack's, in plain torch."""

    def forward(
        self, x: torch.Tensor, w: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor
    ) -> None:
        made = x @ w.t()
        gate.copy_(made[:, : len(w) // 2])
        up.copy_(made[:, len(w) // 2 :])
        out.copy_(torch.nn.functional.silu(gate) * up)

    def slopes(
        self, g: torch.Tensor, w: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, of_gate: torch.Tensor,
        of_up: torch.Tensor, again: torch.Tensor | None,
    ) -> None:  # fmt: skip
        leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
        made = torch.nn.functional.silu(leaves[0]) * leaves[1]
        for out, gradient in zip((of_gate, of_up), torch.autograd.grad(made, leaves, g @ w), strict=True):
            out.copy_(gradient)
        if again is not None:
            again.copy_(made)


KERNELS = glus(Aten(), Emulated())


def _weights(bucket: torch.Tensor, features: int, width: int) -> list[torch.Tensor]:
    return [half.view(features, width) for half in bucket.chunk(2)]


@pytest.mark.parametrize("features", [7, 64, 1100])
def test_it_computes_what_the_reference_does(features: int) -> None:
    torch.manual_seed(features)
    width, rows = 6, (5, 3)
    weights = _weights(torch.randn(2 * features * width) / 4, features, width)  # small sums: few bits are rounded off
    x, g = torch.randn(*rows, width), torch.randn(*rows, features)
    found = list[list[torch.Tensor]]()
    for kernel in (KERNELS["merged_glu"], GLU["merged_glu"]):
        out, packed = torch.empty(*rows, features), torch.empty(*rows, 2 * features)
        kernel.forward(ENV, SITE, [x], weights, [out, packed])
        gradient, slopes = torch.empty_like(x), torch.empty_like(packed)
        assert kernel.input_gradient and kernel.weight_gradient
        kernel.input_gradient(ENV, SITE, [packed, g], weights, [gradient, slopes])
        bucket = torch.ones(2 * features * width)
        into = _weights(bucket, features, width)
        for add in (False, True):
            kernel.weight_gradient(ENV, SITE, [x, slopes], into, add)
        found.append([out, packed, gradient, slopes, bucket])
    for mine, reference in zip(*found, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("features", [7, 64])
def test_the_way_back_through_down_is_the_reference_s(features: int, again: bool) -> None:
    """In one call, from gate and up as they are kept; with SwiGLU's result, if it is made again."""
    torch.manual_seed(features)
    width, rows, down = 6, (5, 3), torch.randn(4, features)
    weights = _weights(torch.randn(2 * features * width), features, width)
    x, g, found = torch.randn(*rows, width), torch.randn(*rows, 4), list[list[torch.Tensor]]()
    for kernels in (KERNELS, GLU):
        out, packed = torch.empty(*rows, features), torch.empty(*rows, 2 * features)
        kernels["merged_glu"].forward(ENV, SITE, [x], weights, [out, packed])
        gradient, slopes = torch.empty_like(x), torch.empty_like(packed)
        back = kernels["glu_linear"].input_gradient
        assert back
        made = [torch.empty_like(out)] if again else []
        back(ENV, SITE, [packed, g], [*weights, down], [gradient, slopes, *made])
        found.append([gradient, slopes, *made])
        torch.testing.assert_close(made, [out] * len(made), rtol=1e-5, atol=1e-5)
    for mine, reference in zip(*found, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


def test_weights_that_lie_apart_are_a_bug() -> None:
    x, weights = torch.randn(4, 6), [torch.randn(8, 6), torch.randn(8, 6)]
    with pytest.raises(Bug, match="behind each other"):
        KERNELS["merged_glu"].forward(ENV, SITE, [x], weights, [torch.empty(4, 8), torch.empty(4, 16)])
