"""Copies to the host and back: each value leaves and comes back once, a layer ahead, and two places are enough."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penteract.config.layout import Edit, Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.model.decoder import record
from penteract.ops.frees import Instruction
from penteract.ops.lower import Chunk, lower
from penteract.ops.offload import OFFLOAD_OPS
from tiny import SIZES

MODEL = ModelSpec(**{**SIZES, "layers": 5})
EDITS = (
    Edit(("*",), ("layer_inputs",)),
    Edit(("tp_all_gather",), ("*",)),
    Edit((), ("attention", "swiglu")),
    Edit(("tp_all_gather", "swiglu"), ("layer_inputs", "linear")),
)


def chunk(edit: Edit, every: int = 1, *, split: bool = False, tp: int = 2) -> Chunk:
    edits = {layer: edit if layer % every == 0 else Edit(edit.recompute) for layer in range(MODEL.layers)}
    return lower(record(MODEL, Mesh(Layout(tp=tp)), 0, 16).tape, Edit(edit.recompute), edits, split=split)


def said(calls: Sequence[Instruction], op_name: str, phase: str) -> list[int]:
    """The layers of these calls, in order."""
    return [i.call.site.layer for i in calls if (i.call.site.op_name, i.call.phase) == (op_name, phase)]


@pytest.mark.parametrize("edit", EDITS, ids=str)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("split", [False, True])
def test_what_leaves_comes_back_and_is_on_the_device_only_when_it_must_be(edit: Edit, every: int, split: bool) -> None:
    made = chunk(edit, every, split=split)
    left = [i.call for i in made.actions["Fwd"] if (i.call.site.op_name, i.call.phase) == ("to_host", "start")]
    assert left
    assert {c.site.layer for c in left} == set(range(0, MODEL.layers, every))
    gone, there = {c.ins[0] for c in left}, {c.outs[0] for c in left}
    for name, instructions in made.actions.items():
        for i in instructions:
            if name == "Fwd":
                gone -= set(i.frees)
            else:
                assert not {c.ins[0] for c in left} & set(i.call.ins), "what left is read where it was"
                there -= set(i.frees)
    assert not gone, "what left is kept on the device too"
    assert not there, "what is on the host is never let go of"
    assert all(made.specs[c.outs[0]].pinned and not made.specs[c.ins[0]].pinned for c in left)


@pytest.mark.parametrize("edit", EDITS, ids=str)
@pytest.mark.parametrize("every", [1, 2])
def test_at_most_two_layers_are_on_their_way(edit: Edit, every: int) -> None:
    made = chunk(edit, every)
    for instructions in made.actions.values():
        alive: dict[int, int] = {}
        for i in instructions:
            alive |= {r: made.turns[r] for r in i.call.outs if r in made.turns}
            assert len(set(alive.values())) <= 2
            assert len({turn % 2 for turn in alive.values()}) == len(set(alive.values())), "two take one place"
            for r in i.frees:
                alive.pop(r, None)
        assert not alive


def test_a_layer_comes_back_while_the_one_before_it_runs() -> None:
    calls = chunk(EDITS[0]).actions["Bwd"]
    order = [(i.call.site.op_name, i.call.phase, i.call.site.layer) for i in calls]
    for layer in range(MODEL.layers - 1):
        start, finish = (order.index(("from_host", phase, layer)) for phase in ("start", "finish"))
        between = {at for op_name, _, at in order[start:finish] if op_name not in OFFLOAD_OPS}
        assert layer + 1 in between and layer - 1 not in between
    assert order[0] == ("from_host", "start", MODEL.layers - 1)


def test_a_layer_s_input_leaves_while_the_layer_runs() -> None:
    calls = chunk(EDITS[0]).actions["Fwd"]
    order = [(i.call.site.op_name, i.call.phase, i.call.site.layer) for i in calls]
    for layer in range(MODEL.layers):
        start, finish = (order.index(("to_host", phase, layer)) for phase in ("start", "finish"))
        assert {at for _, _, at in order[start:finish]} == {layer}
        assert finish - start > 5
    assert said(calls, "to_host", "start") == list(range(MODEL.layers))
