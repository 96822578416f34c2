"""Fused attention without a GPU: its operators replaced by their arithmetic, it must be the reference kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from op_kernels.aten import Aten
from op_kernels.fa4 import Fa4
from op_kernels.fused import NAMES, SMALL, Case, Trial
from penteract.config.precision.policy import RECIPES
from penteract.config.rules.kernel_limits import most_documents
from penteract.engine.device.storages import Storages
from penteract.engine.kernels.fused_attention.chunk_order import ChunkOrder, QueryChunk
from penteract.engine.kernels.fused_attention.cudnn import cudnn
from penteract.engine.kernels.fused_attention.fa4 import documents, whole
from penteract.engine.kernels.fused_attention.flash import ends, flash
from penteract.engine.kernels.reference import REFERENCE
from penteract.ops.declarations import declaration_of

KERNELS = {
    "flash": flash(Aten()),
    "cudnn": cudnn(Aten()),
    "fa4": whole(Fa4),
    "fa4_documents": documents(Fa4),
}


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_fused_attention_is_the_reference(case: Case):
    wanted = Trial(case, "fp64").run(REFERENCE["attention"])
    got = Trial(case, "fp64").run(KERNELS[case.kernel])
    for name, x, y in zip(NAMES, got, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


PACKED = [case for case in SMALL if case.layout.cp == 1 or case.layout.cp_method == "ulysses"]


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_views_of_one_register_are_read_and_written(case: Case):
    wanted, views = Trial(case, "fp64").run(REFERENCE["attention"]), Trial(case, "fp64")
    views.pack()
    for name, x, y in zip(NAMES, views.run(KERNELS[case.kernel]), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_views_of_one_register_need_no_more(case: Case):
    test_workspace_is_what_is_declared(case, packed=True)


def test_reference_attention_takes_views_of_one_register():
    case = Case(batch=3, heads=(6, 2))
    wanted, views = Trial(case, "fp64").run(REFERENCE["attention"]), Trial(case, "fp64")
    views.pack()
    for x, y in zip(views.run(REFERENCE["attention"]), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_workspace_is_what_is_declared(case: Case, packed: bool = False):
    trial, kernel = Trial(case, "bf16"), KERNELS[case.kernel]
    if packed:
        trial.pack()
    declared, shapes = declaration_of(trial.site, case.plan), [s.shape for s in trial.site.ins]
    for phase, call in (("forward", trial.forward), ("input_gradient", trial.backward)):
        with Storages() as storages:
            call(kernel)
        about = (phase, shapes, (), trial.site.attrs, RECIPES["bf16"].widths)
        assert declared.workspace(*about) == storages.peak, phase  # type: ignore[arg-type]
        assert storages.now == 0


@pytest.mark.parametrize(
    ("start", "chunk", "queries", "keys"),
    [
        ([0, 0, 0, 0], QueryChunk(0, 0, 4), [0, 0, 4, 4, 4, 4], [0, 0, 4, 4, 4, 4]),
        ([0, 0, 2, 3], QueryChunk(0, 0, 4), [0, 0, 2, 3, 4, 4], [0, 0, 2, 3, 4, 4]),
        ([0, 1, 2, 3], QueryChunk(0, 0, 4), [0, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4]),
        ([5, 5, 10, 10], QueryChunk(0, 8, 4), [0, 0, 2, 4, 4, 4], [0, 5, 10, 12, 12, 12]),
        ([8, 8, 8, 11], QueryChunk(4, 8, 4), [0, 0, 3, 4, 4, 4], [0, 8, 11, 12, 12, 12]),
        ([0], QueryChunk(0, 0, 1), [0, 0, 1], [0, 0, 1]),
    ],
)
def test_ends_of_documents(start: list[int], chunk: QueryChunk, queries: list[int], keys: list[int]):
    found = ends(torch.tensor(start), chunk)
    assert [x.tolist() for x in found] == [queries, keys]
    assert all(x.dtype == torch.int32 for x in found)


def test_a_list_of_ends_is_much_shorter_than_a_sequence():
    assert most_documents(8192) == 128
    assert [most_documents(n) for n in (1, 16, 100)] == [1, 16, 16]


def test_an_order_restores_and_puts_back():
    order = ChunkOrder((0, 3, 1, 2))
    x = torch.tensor([0, 1, 6, 7, 2, 3, 4, 5])
    assert order.restore(x).tolist() == list(range(8))
    back = torch.empty_like(x)
    order.put(order.restore(x), back)
    assert torch.equal(back, x)
    order.put(order.restore(x), back, end=4)
    assert back.tolist() == [0, 1, 0, 0, 2, 3, 0, 0]
    order.add(order.restore(x), back, end=2)
    assert back.tolist() == [0, 2, 0, 0, 2, 3, 0, 0]
    assert ChunkOrder().restore(x) is x


def test_ends_that_ignore_documents_are_seen(monkeypatch: pytest.MonkeyPatch):
    def blind(start: torch.Tensor, chunk: QueryChunk) -> Any:
        return ends(torch.zeros_like(start), chunk)

    monkeypatch.setattr("penteract.engine.kernels.fused_attention.flash.ends", blind)
    with pytest.raises(AssertionError):
        test_fused_attention_is_the_reference(SMALL[0])
