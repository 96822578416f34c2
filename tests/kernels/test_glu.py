"""Gate and up projections whose product applies SwiGLU: an emulated product, and Triton's interpreter for the rest,
against the reference kernel."""

from __future__ import annotations

import pytest
import torch

from op_kernels.test_wide_product import Aten
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.engine.kernels.fused_glu import glus
from penteract.engine.kernels.glu import GLU
from penteract.engine.kernels.kernel import Env
from penteract.engine.kernels.triton.swiglu import put_slopes, put_swiglu_input
from penteract.errors import Bug
from penteract.ops.tape import Site

SITE = Site("merged_glu", (), ())
ENV = Env(Mesh(Layout()), 0, torch.float32)


def emulated(x: torch.Tensor, w: torch.Tensor, packed: torch.Tensor, out: torch.Tensor) -> None:
    """As quack's: gate and up of a feature next to each other."""
    gate, up = (x @ w.t()).chunk(2, -1)
    packed.copy_(torch.stack((gate, up), -1).flatten(-2))
    out.copy_(torch.nn.functional.silu(gate) * up)


KERNEL = glus(Aten(), emulated)["merged_glu"]


def _weights(bucket: torch.Tensor, features: int, width: int) -> list[torch.Tensor]:
    return [half.view(features, width) for half in bucket.chunk(2)]


@pytest.mark.parametrize("features", [7, 64, 1100])
def test_it_computes_what_the_reference_does(features: int) -> None:
    torch.manual_seed(features)
    width, rows = 6, (5, 3)
    weights = _weights(torch.randn(2 * features * width), features, width)
    x, g = torch.randn(*rows, width), torch.randn(*rows, features)
    assert KERNEL.input_gradient and KERNEL.weight_gradient
    found = list[list[torch.Tensor]]()
    for kernel in (KERNEL, GLU["merged_glu"]):
        out, packed = torch.empty(*rows, features), torch.empty(*rows, 2 * features)
        kernel.forward(ENV, SITE, [x], weights, [out, packed])
        gradient, slopes = torch.empty_like(x), torch.empty_like(packed)
        assert kernel.input_gradient and kernel.weight_gradient
        kernel.input_gradient(ENV, SITE, [packed, g], weights, [gradient, slopes])
        bucket = torch.ones(2 * features * width)
        into = _weights(bucket, features, width)
        for add in (False, True):
            kernel.weight_gradient(ENV, SITE, [x, slopes], into, add)
        found.append([out, gradient, slopes, bucket])
    for mine, reference in zip(*found, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_those_of_apart_gate_and_up(dtype: torch.dtype) -> None:
    """To the bit: the same arithmetic over other places."""
    torch.manual_seed(0)
    gate, up, g = (torch.randn(9, 2, 300).to(dtype) for _ in range(3))
    slopes, apart = torch.empty(9, 2, 600, dtype=dtype), torch.empty(9, 2, 600, dtype=dtype)
    put_slopes(torch.stack((gate, up), -1).flatten(-2), g, slopes)
    put_swiglu_input(gate, up, g, *apart.chunk(2, -1))
    assert torch.equal(slopes, apart)


def test_weights_that_lie_apart_are_a_bug() -> None:
    x, weights = torch.randn(4, 6), [torch.randn(8, 6), torch.randn(8, 6)]
    with pytest.raises(Bug, match="behind each other"):
        KERNEL.forward(ENV, SITE, [x], weights, [torch.empty(4, 8), torch.empty(4, 16)])
