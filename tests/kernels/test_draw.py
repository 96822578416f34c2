"""Initial weights drawn by a kernel have the bits of those that torch draws: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.config.resolve.presets import TINY, TINY_LATENT, TINY_MOE
from penteract.engine.executor import draw_kernel
from penteract.engine.executor.initial_weights import PLACE, Quantiles, elements_of, initialise
from penteract.engine.state import state
from penteract.engine.state.counter_random import STRIDE, ParameterSlice, mix
from penteract.ops.params import Param
from penteract.step.program import Program, compile_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TABLE = Quantiles.on(DEVICE)
SEED = 7
RANKS = [(Layout(), 0), (Layout(tp=2), 1), (Layout(dp=2, tp=2, zero=3), 3)]


def gaps(p: Program, q: Param) -> int:
    """How many dims of a parameter a rank has a part of."""
    return len(ParameterSlice.of(q, p.mesh, p.rank, at=0, begin=0, count=q.numel(p.mesh)).gaps)


@pytest.mark.parametrize("model", [TINY, TINY_MOE, TINY_LATENT], ids=["dense", "experts", "latent"])
@pytest.mark.parametrize(("layout", "rank"), RANKS, ids=["", "tp", "zero 3"])
def test_a_rank_draws_the_same_bits(model: ModelSpec, layout: Layout, rank: int) -> None:
    """Parts of each parameter, of which the last is shorter than a tile."""
    p, met = compile_step(model, layout, 32, rank=rank), set[int]()
    for q in {(q.shape, q.scale, gaps(p, q)): q for q in p.params}.values():
        n = q.numel(p.mesh)
        torches, kernels = (elements_of(p, q, SEED, TABLE, by_kernel=by_kernel) for by_kernel in (False, True))
        for part in (slice(0, min(n, 3000)), slice(n // 3, min(n, n // 3 + 1111)), slice(n - 1, n)):
            assert torch.equal(torches(part), kernels(part)), q.name
        met |= {gaps(p, q)} if q.scale is not None else set()
    assert met == ({0, 1} if layout.tp > 1 else {0})


def test_two_dims_that_are_cut_and_numbers_beyond_32_bits() -> None:
    """As of a table of experts: rows and tables of which a rank has a part, far from the first element."""
    whole = ParameterSlice("w", (3, 50, 60), (40_000_000_000, 70_000, 100), 2**35 + 17, at=0, begin=0, count=9000)
    assert len(whole.gaps) == draw_kernel.GAPS
    z, out = torch.empty(8000, dtype=torch.int64, device=DEVICE), torch.empty(8000, device=DEVICE)
    whole.put_global_indices(z, 777)
    start = whole.start(SEED, "initial")
    expected = TABLE.normal(mix(z.mul_(STRIDE).add_(start))).mul_(0.02)
    draw_kernel.draw(out, whole, 777, start, 0.02, TABLE.middles, TABLE.steps, PLACE)
    assert torch.equal(expected, out)


def test_only_a_gpu_that_computes_with_triton_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    p = compile_step(TINY, Layout(elementwise="triton"), 32)
    drawn = list[str]()

    def record(*_: object) -> None:
        drawn.append("drawn")

    monkeypatch.setattr(draw_kernel, "draw", record)
    made = state.allocate(p, torch.device("cpu"))
    initialise(p, made, SEED)
    assert not drawn

    class OnGpu:
        """A tensor, for all that is asked of it, on a GPU."""

        is_meta, is_cuda, device = False, True, made.routed.device

    monkeypatch.setattr(made, "routed", OnGpu())
    initialise(p, made, SEED)
    assert drawn
    drawn.clear()
    initialise(replace(p, mesh=Mesh(Layout())), made, SEED)  # with plain torch
    assert not drawn
    elements_of(p, p.params[0], SEED, TABLE, by_kernel=True)(slice(0, 8))
    assert drawn == ["drawn"]
