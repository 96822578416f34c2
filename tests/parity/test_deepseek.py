"""All that DeepSeek-V3 brings, at once and under every layout; and what its latents are for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

import mutations as m
from draws import draws
from layouts import Case, Mutation
from parity.test_layouts import check
from parity.test_mutations import red
from penteract.config.layout import Layout
from penteract.config.model import LatentSpec, ModelSpec
from penteract.readings.price import price
from pool import Pool
from strategies import cases
from tiny import SIZES

LATENT = LatentSpec(kv_rank=6, plain_size=2, rope_size=2, value_size=5, query_rank=7)
MODEL = ModelSpec(**{**SIZES, "kv_heads": 8}, latent=LATENT, mtp_layers=2)

ONE = Case(MODEL, Layout(gradient_accumulation_steps=3))  # three samples: two of them of several documents
DP = Case(MODEL, Layout(dp=2))
PP = Case(MODEL, Layout(pp=2, gradient_accumulation_steps=2))

FAULTS: list[tuple[Mutation, Case, set[str]]] = [
    (m.documents_run_together_ahead, ONE, {"values"}),
    (m.targets_ahead_not_counted, DP, {"values"}),
    (m.embedding_kept_at_home, PP, {"values"}),
    (m.rotated_key_of_one_head, ONE, {"values"}),
]


@draws(2, wide=15)
@given(case=cases(max_ranks=8, deepseek=True))
def test_a_layout_is_one_process_and_its_price(pool: Pool, case: Case) -> None:
    check(pool, case)


@pytest.mark.parametrize(("mutation", "case", "expected"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_a_fault_is_seen_where_it_should_be(pool: Pool, mutation: Mutation, case: Case, expected: set[str]) -> None:
    assert red(pool, case, mutation) == expected


@pytest.mark.parametrize("case", [ONE, DP, PP], ids=["one", "dp", "pp"])
def test_without_a_fault_all_is_green(pool: Pool, case: Case) -> None:
    assert red(pool, case) == set()


def gathered(model: ModelSpec, axis: str) -> int:
    """Elements that one layer's attention gathers in a step's forward."""
    layout = Layout(**{axis: 2}, recompute=())  # type: ignore[arg-type]
    wires = Counter[int]()
    for layers in (1, 2):
        p = Case(replace(model, layers=layers, mtp_layers=0), layout).compile(0)
        wires[layers] = price(p).wires["all_gather", p.mesh.group(axis, 0)] // 8
    return wires[2] - wires[1]


def test_context_ranks_gather_latents() -> None:
    """16 tokens: of a latent and one key, not of keys and values of all heads."""
    assert gathered(MODEL, "cp") == 16 * (6 + 2)
    assert gathered(replace(MODEL, latent=None), "cp") == 16 * 8 * (4 + 4)


def test_tensor_ranks_gather_latents() -> None:
    """Forward, 16 tokens: the latents, and what the MLP takes in; backward, the gradients of two regions' results."""
    assert gathered(MODEL, "tp") == 16 * (7 + 6 + 2 + 32) + 16 * 2 * 32
