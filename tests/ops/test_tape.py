"""The tape and its lowering: one consumer a value, named recomputing, deferred weight gradients, last uses."""

from __future__ import annotations

import pytest

from penteract.config.layout import Edit, Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.errors import BadInput, Bug
from penteract.model.decoder import record
from penteract.ops.do import Do
from penteract.ops.lower import Chunk, lower
from penteract.ops.params import Param, Shard, reduce_ranks
from penteract.step.program import compile_step

MODEL = ModelSpec(layers=2, hidden_size=32, heads=4, kv_heads=2, head_size=8, ffn_size=64, vocab_size=64)


def op_names(chunk: Chunk, action: str, phase: str) -> list[str]:
    return [i.call.site.op_name for i in chunk.actions[action] if i.call.phase == phase]


def test_a_value_has_one_consumer() -> None:
    do = Do(Mesh(Layout()))
    x = do.receive((8, 1, 32))
    do.gelu(x)
    with pytest.raises(Bug, match=r"FORK.*use do.fork"):
        do.gelu(x)


def test_every_site_knows_the_line_that_said_it() -> None:
    lines = {op.site.line.split(":")[0] for op in record(MODEL, Mesh(Layout()), 0, 16).tape.ops}
    assert {"model/attention.py", "model/mlp.py", "model/block.py"} <= lines


def test_recomputing_by_name_adds_that_word_to_the_backward_alone() -> None:
    tape = record(MODEL, Mesh(Layout()), 0, 16).tape
    plain, recomputed = lower(tape), lower(tape, Edit(("swiglu",)))
    assert op_names(plain, "Bwd", "forward").count("swiglu") == 0
    assert op_names(recomputed, "Bwd", "forward").count("swiglu") == MODEL.layers
    assert op_names(recomputed, "Fwd", "forward") == op_names(plain, "Fwd", "forward")


def test_weight_gradients_are_the_same_set_wherever_they_run() -> None:
    tape = record(MODEL, Mesh(Layout(tp=2)), 0, 16).tape
    fused, split = lower(tape, Edit(("tp_all_gather",))), lower(tape, Edit(("tp_all_gather",)), split=True)
    late = op_names(split, "Wgt", "weight_gradient")
    assert late and set(late) == {"linear", "embedding"}
    assert sorted(op_names(fused, "Bwd", "weight_gradient")) == sorted(op_names(split, "Inp", "weight_gradient") + late)


def test_weight_gradients_run_beside_the_collective_of_their_input() -> None:
    calls = [
        i.call for i in lower(record(MODEL, Mesh(Layout(tp=2)), 0, 16).tape, Edit(("tp_all_gather",))).actions["Bwd"]
    ]
    said = [(c.site.op_name, c.phase) for c in calls]
    at = said.index(("reduce_scatter", "start"))
    between = said[at : said.index(("reduce_scatter", "finish"))]
    assert ("linear", "weight_gradient") in between


@pytest.mark.parametrize("recompute", [(), ("tp_all_gather",), ("*",)])
def test_every_register_is_freed_once_after_its_last_use(recompute: tuple[str, ...]) -> None:
    chunk = lower(record(MODEL, Mesh(Layout(tp=2)), 0, 16).tape, Edit(recompute))
    instructions = [*chunk.actions["Fwd"], *chunk.actions["Bwd"]]
    freed: set[int] = set()
    for i in instructions:
        assert not freed & {*i.call.ins, *i.call.outs}
        assert not freed & set(i.frees)
        freed |= set(i.frees)
    made = {r for i in instructions for r in i.call.outs}
    assert made == freed


def test_an_unknown_word_to_recompute_is_refused() -> None:
    with pytest.raises(BadInput, match=r"OP.*swiglu"):
        compile_step(MODEL, Layout(recompute=("swigluu",)), 16)


def test_holders_are_the_ranks_with_the_same_piece() -> None:
    """Against the definition, rank by rank, for every way to cut that the models use."""
    for layout in (Layout(dp=2, tp=4), Layout(dp=4, cp=2, ep=4, tp=2), Layout(pp=2, cp=2, tp=2, ep=2)):
        mesh = Mesh(layout)
        for shards in (
            (),
            (Shard(0, "tp"),),
            (Shard(0, "tp", 2),),
            (Shard(0, "ep"), Shard(1, "tp", 1)),
            (Shard(0, "ep"),),
        ):
            q = Param("w", (64, 64), shards)
            for rank in range(layout.world):
                at = mesh.coordinates(rank)
                piece = [s.index(mesh, rank) for s in shards]
                want = [
                    r
                    for r in range(layout.world)
                    if mesh.coordinates(r)["pp"] == at["pp"] and [s.index(mesh, r) for s in shards] == piece
                ]
                assert list(reduce_ranks(q.cut(mesh), (at["pp"],), mesh, rank)) == want
