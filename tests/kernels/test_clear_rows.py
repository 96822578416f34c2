"""Tables of whose gradients a step clears, adds up and reads the rows in use alone, in Triton's interpreter: the same
to the bit as with all rows; and what is not in use is neither written nor read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kernels.test_update import MODEL, SPEC, by_reference
from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.engine.kernels import registry
from penteract.engine.kernels.kernel import Env, TorchKernel
from penteract.engine.kernels.triton.embedding import EMBEDDING
from penteract.engine.kernels.triton.optimizer import adamw, sum_of_squares
from penteract.engine.kernels.triton.optimizer.sum_of_squares import Squares
from penteract.engine.session import trainer
from penteract.engine.state import state as training_state
from penteract.ops.declarations import Implementation
from penteract.ops.tape import Site
from penteract.step.clear_rows import ClearRows, clear_rows
from penteract.step.program import compile_step
from precisions import RECIPES, Small, kept

ROWS, WIDTH, TILE = 40, 32, 16
SITE = Site("embedding", (), (), ("table",), ((ROWS, WIDTH),), {"axis": ""})
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="small trainers are on the CPU")


def put(table: torch.Tensor, ids: torch.Tensor, g: torch.Tensor, *, add: bool, clears: bool = True) -> None:
    names = frozenset({"table"}) if clears else frozenset[str]()
    env = Env(Mesh(Layout()), 0, torch.float32, clear_rows=names)
    EMBEDDING["embedding"].weight_gradient(env, SITE, [ids, g], [table], add)  # type: ignore[misc]


def steps(table: torch.Tensor, *, clears: bool) -> list[torch.Tensor]:
    """Three of two micro-batches each: with gradients of zero, some that cancel out, and ids that come again."""
    generator, found = torch.Generator().manual_seed(3), list[torch.Tensor]()
    for _ in range(3):
        for micro in range(2):
            ids = torch.randint(0, ROWS, (6, 2), generator=generator)
            g = torch.randn(6, 2, WIDTH, generator=generator)
            g[0, :, 0], g[1], ids[2], g[2, 0] = 0, 0, ids[2, 0], -g[2, 1]
            put(table, ids, g, add=micro == 1, clears=clears)
        found.append(table.clone())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_in_use_are_cleared_and_marked(dtype: torch.dtype) -> None:
    wanted = steps(torch.full((ROWS, WIDTH), torch.nan, dtype=dtype), clears=False)
    found = steps(torch.zeros(ROWS, WIDTH, dtype=dtype), clears=True)
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)
        unsigned = got[:, 0].view(torch.int32 if dtype == torch.float32 else torch.int16)
        assert bool(((unsigned != 0) | (got == 0).all(1)).all())  # a row that looks clear is
    assert any((want[:, 0] == 0)[want.any(1)].any() for want in wanted)  # of some, the mark alone tells


def test_a_row_that_no_step_used_is_not_written() -> None:
    table = torch.zeros(ROWS, WIDTH)
    table[7, 1:] = torch.nan  # it looks clear
    for _ in range(2):
        put(table, torch.tensor([[1], [2]]), torch.ones(2, 1, WIDTH), add=False)
    assert table[7, 1:].isnan().all()
    assert table[[1, 2]].eq(1).all()
    assert not table[[*range(7), *range(8, ROWS)]].isnan().any()


def bucket(*, spoilt: bool) -> torch.Tensor:
    """A gradient: a tile, a table of which two rows are in use, a tile and a half. `spoilt`: what must not be read."""
    table = torch.zeros(ROWS, WIDTH)
    put(table, torch.tensor([[3], [3], [ROWS - 1]]), torch.randn(3, 1, WIDTH, generator=_generator()), add=False)
    if spoilt:
        table[[*range(3), *range(4, ROWS - 1)], 1:] = torch.nan
    some = torch.randn(TILE * 5 // 2, generator=_generator())
    return torch.cat([some[:TILE], table.flatten(), some[TILE:]])


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


TABLE = ClearRows(TILE, TILE + ROWS * WIDTH, WIDTH)


def test_the_norm_leaves_out_rows_that_are_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_of_squares, "TILE", TILE)
    totals = list[torch.Tensor]()
    for x, rows in ((bucket(spoilt=False), None), (bucket(spoilt=False), TABLE), (bucket(spoilt=True), TABLE)):
        squares, out = Squares(), torch.zeros(())
        squares.add(x, rows)
        squares.total(out)
        totals.append(out)
    assert totals[0] == totals[1] == totals[2] > 0
    uneven = Squares()
    uneven.add(bucket(spoilt=True), replace(TABLE, width=WIDTH + 1))  # tiles of several rows: all is read
    uneven.total(out := torch.zeros(()))
    assert out.isnan()


def test_the_update_leaves_out_rows_that_are_clear() -> None:
    form, made = adamw.UpdateForm(tile=TILE), list[list[torch.Tensor]]()
    for x, rows in ((bucket(spoilt=False), None), (bucket(spoilt=False), TABLE), (bucket(spoilt=True), TABLE)):
        mean, square, master = (torch.rand(len(x), generator=_generator()) for _ in range(3))
        factors, nonfinite = torch.tensor([1.0, 0.5, 0.1, 0.9, 0.8, 0.99, 1e-2]), torch.zeros(())
        adamw.update(x, mean, square, master, None, factors, nonfinite, (0.1, 1e-8), decay=True, rows=rows, form=form)
        made.append([mean, square, master, nonfinite])
    for some in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], some, strict=True))


# ---- where a step may -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tied", "layout", "found"),
    [
        (False, {}, True),
        (False, {"gradient_accumulation_steps": 2}, True),
        (False, {"tp": 2}, True),
        (False, {"elementwise": "reference"}, False),
        (True, {}, False),  # the head's product writes all rows
        (False, {"dp": 2}, False),  # the sum over ranks has other rows
        (False, {"dp": 2, "zero": 3}, False),  # the buffer is not the table's alone
    ],
)
def test_only_tables_that_look_ups_alone_write_are_kept_clear(tied: bool, layout: dict[str, Any], found: bool) -> None:
    lay = Layout(**{"micro_batch_size": 4, "elementwise": "triton"} | layout)
    p = compile_step(replace(MODEL, tied=tied), lay, 64, precision="bf16")
    assert bool(clear_rows(p)) is found
    for name, rows in clear_rows(p).items():
        b, place = next((b, b.params.index(q)) for b in p.buckets for q in b.params if q.name == name)
        assert rows.begin == b.offsets[place]
        assert (rows.end - rows.begin) // rows.width * p.layout.tp == MODEL.vocab_size


def test_a_trainer_moves_as_if_all_rows_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of two micro-batches. Only the table has tiles of a row: the interpreter takes its time for each."""

    def kernel(op_name: str, one: Implementation, device: str) -> TorchKernel:
        return EMBEDDING[op_name] if op_name == "embedding" else by_reference(op_name, one, device)

    add, update, left_out = Squares.add, adamw.update, list[str]()

    def summed(self: Squares, x: torch.Tensor, rows: ClearRows | None = None) -> None:
        left_out.extend(["norm"] if rows else [])
        with patch.object(sum_of_squares, "TILE", TILE if rows else 2048):
            add(self, x, rows)

    def updated(*about: Any, rows: ClearRows | None = None, **named: Any) -> None:
        left_out.extend(["update"] if rows else [])
        update(*about, rows=rows, form=adamw.UpdateForm(tile=TILE) if rows else adamw.FORM, **named)

    monkeypatch.setattr(Squares, "add", summed)
    monkeypatch.setattr(adamw, "update", updated)
    layout, states = Layout(micro_batch_size=1, gradient_accumulation_steps=2, elementwise="triton"), list[Any]()
    for rows_of in (clear_rows, lambda p: {}):
        with (
            patch.object(trainer, "check_kernels"),
            patch.object(registry, "kernel", kernel),
            patch.object(training_state, "clear_rows", rows_of),
        ):
            run = Small(RECIPES["bf16"], replace(MODEL, vocab_size=264), 2, layout, replace(SPEC, clip_norm=0.0))
            run.losses()
        states.append(kept(run.state))
    assert left_out == ["norm", "update"] * 2  # of the first
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
