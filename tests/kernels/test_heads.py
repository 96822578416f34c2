"""Query and key heads in Triton's interpreter, around attention of plain torch: values, gradients, workspace and kept
bytes against what is declared, and the kernels alone against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from kernels.test_one_pass import angles_are_there, let_go  # noqa: F401 (a fixture)
from op_kernels.case import Case
from op_kernels.cases import CASES
from op_kernels.trial import check
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import RopeScaling
from penteract.engine.kernels.fused_attention.normed_attention import ON_GPU, PLAIN, HeadKernels, normed
from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.kernels.triton import heads, rotary
from penteract.ops.declarations.attention import ATTENTION
from penteract.ops.declarations.fused_attention.normed_attention import NormedAttention
from penteract.ops.tape import Site

TRIED = [case for case in CASES if case.op_name == "normed_attention"]
YARN = RopeScaling(kind="yarn", factor=40.0, original_positions=256, attention_factor=1.2)
ABOUT = {"plain_size": 0, "theta": 1e4, "epsilon": 1e-5}


@pytest.fixture(autouse=True)
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a program, of which the interpreter runs few in a second."""
    for module in ("engine.kernels.triton.heads", "ops.declarations.fused_attention.normed_attention"):
        monkeypatch.setattr(f"penteract.{module}.PARTS", 3)


@pytest.fixture(autouse=True)
def same_angles(angles_are_there: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(heads, "turns", rotary.turns)


def _of_views(kernel: TorchKernel) -> TorchKernel:
    """Attention that reads views, as those of GPUs do: contiguous copies are nobody's memory."""

    def phase(run: Any) -> Any:
        def of_copies(env: Env, site: Site, ins: list[Any], *about: Any) -> None:
            with _disable_current_modes():
                apart = [x.contiguous() for x in ins[:3]]
            run(env, site, [*apart, *ins[3:]], *about)

        return of_copies

    return TorchKernel(phase(kernel.forward), phase(kernel.input_gradient))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("precision", ["bf16", "fp32", "bf16_pure", "fp16"])
@pytest.mark.parametrize("case", TRIED, ids=str)
def test_a_kernel_does_what_it_declares(case: Case, precision: str) -> None:
    declaration = NormedAttention(ATTENTION["attention"], copies=False)
    assert check(case, precision, declaration, let_go(normed(_of_views(REFERENCE["attention"]), ON_GPU))) == []


def _both(site: Site, tokens: tuple[int, int]) -> list[list[torch.Tensor]]:
    """What plain torch makes, and what the kernels make, of the same heads: forward, backward, weights."""
    width, turned, size = (
        sum(site.attrs["widths"]), int(site.attrs["rotary_columns"]), int(site.attrs["head_size"])
    )  # fmt: skip
    generator = torch.Generator().manual_seed(width)
    packed, gradient = (torch.randn(*tokens, width, generator=generator) for _ in range(2))
    weights = [torch.randn(size, generator=generator) for _ in range(2)]
    positions = torch.randint(0, 5000, tokens, generator=generator)
    env, found = Env(Mesh(Layout()), 0, torch.float32), list[list[torch.Tensor]]()
    for kernels in (PLAIN, HeadKernels(heads.put_heads, heads.take_back, heads.put_sums)):
        made: list[Any] = [torch.full((*tokens, n), torch.nan) for n in (turned, turned // size)]
        kernels.put(env, site, [packed, positions], weights, made)
        back, sums = gradient.clone(), torch.full((2, heads.PARTS, size), torch.nan)
        kernels.take_back(env, site, [packed, positions, made[1]], weights, [back, sums])
        into = [torch.ones(size), torch.ones(size)]
        for add in (False, True):
            kernels.put_sums(env, site, [sums], into, add)
        found.append([*made, back, *into])
    assert torch.equal(found[1][2][..., turned:], gradient[..., turned:])
    return found


@pytest.mark.parametrize(
    ("counts", "size", "tokens", "scaling"),
    [
        ((8, 2, 2), 16, (37, 2), None),
        ((3, 1, 1), 64, (5, 1), YARN),
        ((5, 5, 5), 24, (3, 3), None),
        ((32, 4, 4), 128, (6, 1), None),
        ((1, 1, 1), 2, (51, 1), None),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_are_plain_torch(
    counts: tuple[int, ...], size: int, tokens: tuple[int, int], scaling: RopeScaling | None
) -> None:
    """Many heads, tiles that are not full, more tokens than parts; and nothing beside query and key is written."""
    widths = tuple(n * size for n in counts)
    attrs = ABOUT | {"head_size": size, "scaling": scaling, "widths": widths, "rotary_columns": sum(widths[:2])}
    for want, got in zip(*_both(Site("normed_attention", (), (), attrs=attrs), tokens), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5 * max(1.0, want.abs().max().item()))
