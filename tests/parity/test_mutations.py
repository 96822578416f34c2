"""Every fault turns the verdict red, and only where it should: values, wires, FLOPs, kept bytes or routing."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mutations as m
from layouts import Case, Mutation, run_case
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec, MoESpec
from pool import Pool
from tiny import SIZES

DENSE = ModelSpec(**SIZES, qkv_bias=True)
EXPERTS = ModelSpec(**SIZES, moe=MoESpec(experts=4, top_k=2, ffn_size=24, score="sigmoid", balance="bias"))

ONE = Case(DENSE, Layout(gradient_accumulation_steps=2))
DP = Case(DENSE, Layout(dp=2))
TP = Case(DENSE, Layout(tp=2))
DP_TP = Case(DENSE, Layout(dp=2, tp=2))
GATHER = Case(DENSE, Layout(cp=2))
RING = Case(DENSE, Layout(cp=4, cp_method="ring"))
PP = Case(DENSE, Layout(pp=2, gradient_accumulation_steps=2))
EP = Case(EXPERTS, Layout(dp=2, ep=2))
ZERO = Case(DENSE, Layout(dp=2, zero=1))
ODD = Case(DENSE, Layout(dp=3, zero=3, gradient_accumulation_steps=2), sequence_length=12)  # buckets with padding
ZERO3 = Case(replace(DENSE, layers=4), Layout(dp=4, zero=3, shard_group=2, gradient_accumulation_steps=2))

FAULTS: list[tuple[Mutation, Case, set[str]]] = [
    (m.gathers_counted_by_their_input, TP, {"wires"}),
    (m.attention_backward_counted_as_forward, ONE, {"FLOPs"}),
    (m.statistics_counted_in_half_width, DP, {"wires", "kept"}),
    (m.routing_taken_for_balanced, EP, {"wires", "FLOPs", "kept"}),
    (m.tensor_ranks_left_out_of_reductions, DP_TP, {"values"}),
    (m.gathered_keys_taken_for_ordered, GATHER, {"values"}),
    (m.bucket_not_reduced, DP, {"values", "wires"}),
    (m.bucket_reduced_twice, DP, {"values", "wires"}),
    (m.target_counts_not_summed, DP, {"values", "wires"}),
    (m.gather_dropped, TP, {"values", "wires"}),
    (m.gather_doubled, TP, {"wires"}),
    (m.scatter_dropped, GATHER, {"values", "wires"}),
    (m.ring_turned_round, RING, {"values", "wires"}),
    (m.shards_of_the_next_holder, ZERO, {"values"}),
    (m.first_shard_gathered, ZERO, {"values"}),
    (m.shards_not_gathered, ZERO, {"wires"}),
    (m.shards_summed_by_all, ZERO, {"wires"}),
    (m.padding_not_cleared, ODD, {"values"}),
    (m.micro_batches_not_added, ZERO3, {"values"}),
    (m.unit_not_gathered_again, ZERO3, {"values", "wires"}),
    (m.replicas_not_summed, ZERO3, {"values", "wires"}),
    (m.weight_gradient_doubled, PP, {"values"}),
    (m.last_micro_batch_wins, PP, {"values"}),
    (m.gradient_never_written, ONE, {"values"}),
    (m.product_made_twice, ONE, {"FLOPs"}),
    (m.rows_not_regrouped, EP, {"values"}),
    (m.choices_not_tallied, EP, {"routing"}),
    (m.register_never_freed, ONE, {"kept"}),
]
CASES = [ONE, DP, TP, DP_TP, GATHER, RING, PP, EP, ZERO, ZERO3, ODD]


def red(pool: Pool, case: Case, mutation: Mutation | None = None) -> set[str]:
    return set().union(*(v.red for v in pool.run(run_case, case, mutation)))


NAMES = ["one", "dp", "tp", "dp-tp", "gather", "ring", "pp", "ep", "zero", "zero3", "odd"]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_without_a_fault_all_is_green(pool: Pool, case: Case) -> None:
    assert red(pool, case) == set()


@pytest.mark.parametrize(("mutation", "case", "expected"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_a_fault_is_seen_where_it_should_be(pool: Pool, mutation: Mutation, case: Case, expected: set[str]) -> None:
    assert red(pool, case, mutation) == expected


def test_a_rank_that_raises_is_named_and_the_next_case_runs() -> None:
    two = Pool(2)
    try:
        with pytest.raises(RuntimeError, match=r"rank 1(.|\n)*on purpose"):
            two.run(run_case, DP, m.second_rank_raises)
        assert red(two, DP) == set()
    finally:
        two.close()
