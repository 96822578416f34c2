"""What a set of ops keeps and makes again is the union of what its groups do, whichever set it is."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from penteract.config.layout import EVERY_FUSION, Layout
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.precision.policy import RECIPES
from penteract.config.recompute import NONE
from penteract.ops.liveness import LivenessAnalysis, groups
from penteract.readings.layers.layer_program import EMBEDDING_AND_HEAD, LayerType, Recorder
from tiny import SIZES

EXPERTS = ModelSpec(**SIZES, moe=MoESpec(experts=4, top_k=2, ffn_size=24))
CASES = [
    (EXPERTS, Layout()), (EXPERTS, Layout(dp=2, tp=2, ep=2)),
    (EXPERTS, Layout(tp=2, expert_tp=2, cp=2, cp_method="ring")), (ModelSpec(**SIZES), Layout(fuse=EVERY_FUSION)),
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout"), CASES, ids=str)
def test_groups_of_words_know_nothing_of_each_other(model: ModelSpec, layout: Layout) -> None:
    recorder = Recorder(model, 16, RECIPES["bf16"])
    tapes = [
        LivenessAnalysis.of(recorder.tape(layout, kind))
        for kind in (*EMBEDDING_AND_HEAD, LayerType(recorder.names[-1], 0))
    ]
    tables = list(groups(tapes, NONE))
    assert len(tables) >= 4
    told = {}
    for row in product(*tables):
        op_names = frozenset(NONE).union(*(some for some, _ in row))
        told[op_names] = tuple(
            (frozenset().union(*(f[t].kept for _, f in row)), frozenset().union(*(f[t].again for _, f in row)))
            for t in range(len(tapes))
        )
    known = {op.site.op_name for tape in tapes for op in tape.producer.values()} - {*NONE}
    for op_names, lives_of in told.items():
        for tape, (kept, again) in zip(tapes, lives_of, strict=True):
            alone = tape(op_names)
            assert kept == alone.kept
            assert again == {op for op in alone.again if op.site.op_name not in NONE}
    distinct = {tuple(tape(frozenset({*NONE, *some})) for tape in tapes)
                for n in (1, 2, 3, len(known)) for some in combinations(sorted(known), n)}  # fmt: skip
    assert distinct <= {tuple(tape(op_names) for tape in tapes) for op_names in told}, (
        "a set that differs is not among them"
    )
