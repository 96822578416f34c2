"""Ops that are one kernel, in Triton's interpreter: values, gradients, workspace and kept bytes against what is
declared, by the trial of the reference kernels; then rows that lie apart, and sizes that fill no tile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from op_kernels.block_cases import by_expert, moved
from op_kernels.case import Case, behind, draw, given, order, stat, x
from op_kernels.cases import CASES, of_all_ops
from op_kernels.trial import check
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import RopeScaling
from penteract.engine.kernels import rotary
from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.kernels.triton import norm, one_pass
from penteract.engine.kernels.triton.rotary import rotate
from penteract.engine.kernels.triton.strides import columns, row_stride
from penteract.engine.kernels.triton.swiglu import put_swiglu, put_swiglu_input
from penteract.ops.declarations.one_pass import ONE_PASS
from penteract.ops.tape import Site

ROPE = {"head_size": 8, "plain_size": 0, "theta": 1e4, "scaling": None}
YARN = RopeScaling(kind="yarn", factor=40.0, original_positions=256, attention_factor=1.2)


def _wide() -> Iterator[Case]:
    """More than a tile, and not whole ones."""
    yield Case("rms_norm", "many heads", (x(5, 3, 7 * 128),), ((128,),), {"epsilon": 1e-5})
    yield Case("rms_norm", "odd width", (x(3, 1, 1100),), ((1100,),), {"epsilon": 1e-5})
    yield Case("rms_norm", "a wide row", (x(2, 1, 5120),), ((5120,),), {"epsilon": 1e-5})
    yield Case("swiglu", "several tiles", (x(5, 3, 1300), x(5, 3, 1300)))
    yield Case("swiglu", "even tiles", (x(7, 1, 384), x(7, 1, 384)))
    yield Case("swiglu", "no rows", (x(0, 6), x(0, 6)))
    yield Case("rope", "many tokens", (x(9, 1, 3 * 128), draw(10**6, 9, 1)), (), ROPE | {"head_size": 128})
    about = ROPE | {"head_size": 192, "plain_size": 128, "scaling": YARN}
    yield Case("rope", "latent", (x(5, 1, 2 * 192), draw(9000, 5, 1)), (), about)
    targets = given([[4999, -1], [0, 5001]])
    for op_name, beside in (("exp_sum", ()), ("cross_entropy_gradient", (stat(),)), ("logits_gradient", (stat(),))):
        row = stat(2, 2) if not beside else given(torch.full((2, 2), 14.0), "stat")
        yield Case(op_name, "wide", (x(2, 2, 5003), row, targets, *beside), (), {"axis": "tp"})
        about = {"axis": "tp", "z": 1e-3} if beside else {"axis": "tp"}
        yield Case(op_name, "wide, second shard", (x(2, 2, 2501), row, targets, *beside), (), about, 2, 1)
    yield Case("row_max", "wide", (x(2, 1, 4099),))
    many = given(torch.rand(2, 700, 7) + 0.5, "stat")
    tokens = (many, stat(700, 7), draw(9, 700, 7, low=-1))
    yield Case("negative_log_likelihood", "many tokens", tokens, (), {"z": 1e-2})
    some = torch.randint(0, 150, (97, 1, 3), generator=torch.Generator().manual_seed(1))
    yield Case("expert_permutation", "several blocks", (given(some),), (), {"experts": 150})
    for rank in range(3):
        about = {"experts": 150, "ranks": 3}
        yield Case("expert_permutation", f"rank {rank} of three", (given(some),), (), about, rank=rank, ep=3)
    yield Case("permute", "a third", (x(5, 1, 2100), order(15)), (), {"top_k": 3, "ranks": 3, "rows": 5})
    yield Case("unpermute", "a third", (x(5, 2100), x(5, 1, 3), order(15)), (), {"top_k": 3, "ranks": 3})
    for there in (3, 0):
        ends, about = given([0, 1, there], "offset"), {"top_k": 3, "ranks": 3}
        yield Case("padded_permute", f"several blocks, {there} rows", (x(5, 1, 2100), order(15), ends), (),
                   about | {"rows": 10})  # fmt: skip
        rows = behind(there, 10, 2100)
        yield Case("padded_unpermute", f"several blocks, {there} rows", (rows, x(5, 1, 3), order(15), ends), (), about)
        yield Case("padded_swiglu", f"several blocks, {there} rows", (rows, behind(there, 10, 2100), ends))
    yield Case("permute", "several blocks", (x(5, 1, 2100), order(15)), (), {"top_k": 3})
    for inverse in (False, True):
        coming = given([0, 3, 1, 0, 0, 2, 0, 4, 0])
        about = {"ranks": 3, "inverse": inverse}
        yield Case("sort_chunks", f"several blocks, inverse {inverse}", (x(10, 2100), coming), (), about)
    yield from moved("wide rows", [5, 0, 3, 2, 0, 2], 3, 3, 8, 2100)
    yield from by_expert("wide rows", [0, 3, 1, 0, 0, 2, 0, 4, 0], 3, 4, 2100)
    yield from by_expert("many senders", [i % 3 for i in range(33 * 5)], 33, 7, 4)
    copies = [(7 * e) % 23 for e in range(9 * 7)]
    for block in (91, 80):
        about = {"ranks": 9, "block": block}
        yield Case("block_places", f"several programs, {block} rows", (order(sum(copies)), given(copies)), (), about)
    yield Case("block_places", "many ranks", (order(300), given([0, 4, 2] * 50)), (), {"ranks": 75, "block": 8})
    yield Case("unpermute", "several blocks", (x(15, 2100), x(5, 1, 3), order(15)), (), {"top_k": 3})
    yield Case("embedding", "long runs", (draw(3, 20, 2),), ((5, 600),), {"axis": ""})
    yield Case("embedding", "long runs of two shards", (draw(8, 30, 1),), ((4, 20),), {"axis": "tp"}, tp=2, rank=1)


TRIED = [case for case in CASES if case.op_name in ONE_PASS] + list(_wide())


@pytest.fixture(autouse=True)
def angles_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made by the first call, and kept: out of the sight of who counts what a call leaves behind."""
    made = rotary.turns

    def unseen(site: Site, device: torch.device) -> torch.Tensor:
        with _disable_current_modes():
            return made(site, device)

    monkeypatch.setattr("penteract.engine.kernels.triton.rotary.turns", unseen)


def let_go(kernel: TorchKernel) -> TorchKernel:
    """Without what the interpreter holds in cycles after a call."""

    def phase(run: Any) -> Any:
        def and_collect(*about: Any) -> None:
            run(*about)
            gc.collect()

        return run and and_collect

    return TorchKernel(*map(phase, (kernel.forward, kernel.input_gradient, kernel.weight_gradient)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("case", "precision"), of_all_ops(TRIED, "bf16", "fp32", "bf16_pure", "fp16"), ids=str)
def test_a_kernel_does_what_it_declares(case: Case, precision: str) -> None:
    assert check(case, precision, ONE_PASS[case.op_name], let_go(one_pass.ONE_PASS[case.op_name])) == []


# ---- rows that lie apart -----------------------------------------------------------------------------------------


def called(
    op_name: str, phase: str, ins: list[Any], weights: list[torch.Tensor], outs: list[Any], **attrs: Any
) -> None:
    """By kernels and by the reference: the same to the rounding of fp32, whether rows lie together or apart."""
    env = Env(Mesh(Layout()), 0, torch.float32)
    site = Site(op_name, (), (), (), tuple(tuple(w.shape) for w in weights), attrs)
    wanted = [torch.empty(out.shape) for out in outs]
    getattr(one_pass.ONE_PASS[op_name], phase)(env, site, ins, weights, outs)
    getattr(REFERENCE[op_name], phase)(env, site, [i.contiguous() for i in ins], weights, wanted)
    for out, want in zip(outs, wanted, strict=True):
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def apart(*shape: int, at: int = 3) -> torch.Tensor:
    """Columns of a wider tensor, that is full of what must not be read."""
    whole = torch.full((*shape[:-1], shape[-1] + 9), torch.nan)
    some = whole[..., at : at + shape[-1]]
    return some.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + at)))


def test_rows_may_be_columns_of_wider_ones() -> None:
    s, b, n, c = 3, 2, 4, 8
    w, scale = torch.linspace(0.5, 2, c), torch.rand(s, b, n) + 0.5
    called("rms_norm", "forward", [apart(s, b, n * c)], [w], [apart(s, b, n * c), scale.clone()], epsilon=1e-3)
    called("rms_norm", "input_gradient", [apart(s, b, n * c), scale, apart(s, b, n * c, at=5)], [w],
           [apart(s, b, n * c)])  # fmt: skip
    gate, up, g = (apart(s, b, 10, at=at) for at in (1, 2, 3))
    called("swiglu", "forward", [gate, up], [], [apart(s, b, 10)])
    called("swiglu", "input_gradient", [gate, up, g], [], [apart(s, b, 10), apart(s, b, 10)])
    positions = torch.arange(s * b).view(s, b)
    called("rope", "forward", [apart(s, b, n * c), positions], [], [apart(s, b, n * c)], **ROPE)
    called("rope", "input_gradient", [positions, apart(s, b, n * c)], [], [apart(s, b, n * c)], **ROPE)
    logits, targets = apart(s, b, 11), torch.randint(-1, 11, (s, b))
    called("row_max", "forward", [logits], [], [torch.empty(s, b)])
    called("exp_sum", "forward", [logits, logits.amax(-1), targets], [], [torch.empty(2, s, b)], axis="tp")


def test_weight_gradients_of_rows_apart_and_of_more_rows_than_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penteract.ops.declarations.one_pass.PARTS", 3)
    monkeypatch.setattr(norm, "_TILE", 16)
    env, ins = Env(Mesh(Layout()), 0, torch.float32), [apart(11, 2, 4 * 8), torch.rand(11, 2, 4), apart(11, 2, 4 * 8)]
    site = Site("rms_norm", (), (), (), ((8,),), {})
    for add in (False, True):
        got, wanted = torch.ones(8), torch.ones(8)
        norm.rms_norm_weight(env, site, ins, [got], add)
        REFERENCE["rms_norm"].weight_gradient(env, site, [i.contiguous() for i in ins], [wanted], add)  # type: ignore[misc]
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_table_whose_rows_are_apart_takes_gradients_that_are_too() -> None:
    env, site = Env(Mesh(Layout()), 0, torch.float32), Site("embedding", (), (), (), ((5, 6),), {"axis": ""})
    ids, g = torch.tensor([[3, 3, 0], [3, 4, 0]]), apart(2, 3, 6)
    for add in (False, True):
        got, wanted = apart(5, 6), apart(5, 6).contiguous()
        one_pass.ONE_PASS["embedding"].weight_gradient(env, site, [ids, g], [got], add)  # type: ignore[misc]
        REFERENCE["embedding"].weight_gradient(env, site, [ids, g.contiguous()], [wanted], add)  # type: ignore[misc]
        torch.testing.assert_close(got, wanted)


def test_results_may_lie_where_what_was_read_lay() -> None:
    site, positions = Site("rope", (), (), attrs=ROPE | {"plain_size": 2}), torch.arange(6).view(3, 2)
    heads, out = apart(3, 2, 24), torch.empty(3, 2, 24)
    rotate(site, heads, positions, 1, out)
    again = heads.clone()
    rotate(site, heads, positions, 1, heads)
    assert torch.equal(heads, out)
    rotate(site, heads, positions, -1, heads)
    torch.testing.assert_close(heads, again)
    gate, up, g = (apart(3, 2, 10, at=at) for at in (1, 2, 3))
    apart_from = [torch.empty(3, 2, 10), torch.empty(3, 2, 10)]
    put_swiglu_input(gate, up, g, *apart_from)
    put_swiglu_input(gate, up, g, gate, up)
    assert torch.equal(gate, apart_from[0])
    assert torch.equal(up, apart_from[1])
    put_swiglu(gate, up, out := torch.empty(3, 2, 10))
    put_swiglu(gate, up, up)
    assert torch.equal(up, out)


def test_rows_that_are_not_whole_are_refused() -> None:
    assert row_stride(torch.empty(4, 2, 6)[..., :5]) == 6
    assert row_stride(torch.empty(4, 1, 6)[:, :, 1:3]) == 6
    for uneven in (torch.empty(4, 2, 6)[:, :1].expand(4, 3, 6), torch.empty(6, 4).t()):
        with pytest.raises((ValueError, RuntimeError)):
            row_stride(uneven)


def test_tiles_have_few_columns_that_are_not_there() -> None:
    found = {4096: 1024, 14336: 1024, 768: 256, 1408: 128, 1300: 1024, 5: 8}
    assert {width: columns(width) for width in found} == found
