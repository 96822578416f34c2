"""A dimension of degree one is not there: its redistributions record nothing and put nothing on a wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from layouts import Case, run_case
from penteract.config.layout import CP_METHODS, Layout
from penteract.config.mesh import Mesh
from penteract.config.model import LatentSpec, ModelSpec, MoESpec
from penteract.model.decoder import record
from penteract.ops.do import Do, Redistribution, Value
from penteract.ops.spec import Role
from penteract.ops.tape import Call
from penteract.parallel import context, expert, tensor
from penteract.readings.price import price
from pool import Pool
from tiny import SIZES

LATENT = LatentSpec(kv_rank=6, plain_size=2, rope_size=2, value_size=5, query_rank=7)
MODELS = [
    ModelSpec(**SIZES),
    ModelSpec(**SIZES, tied=True, moe=MoESpec(experts=4, top_k=2, ffn_size=24)),
    ModelSpec(**{**SIZES, "kv_heads": 8}, latent=LATENT, mtp_layers=1),
]

_LENGTH = 16
# What each axis may put on the wire. The choices of a sequence are summed over cp·tp.
ALONE: list[tuple[dict[str, Any], set[str]]] = [
    ({}, set()),
    ({"dp": 2}, set()),
    ({"pp": 2}, set()),
    ({"tp": 2}, {"tp", "sequence"}),
    ({"tp": 2, "expert_tp": 2}, {"tp", "sequence"}),
    *(({"cp": 2, "cp_method": method}, {"cp", "sequence"}) for method in CP_METHODS),
    ({"dp": 2, "ep": 2}, {"ep"}),
]


def _value(do: Do, shape: tuple[int, ...] = (4, 2, 8), role: Role = "compute") -> Value:
    return do.input(f"{role} {shape}", shape, role)


IDENTITIES: list[tuple[str, Redistribution, Callable[[Do], list[Value]]]] = [
    ("tp_all_gather", tensor.tp_all_gather, lambda do: [_value(do)]),
    ("tp_reduce_scatter", tensor.tp_reduce_scatter, lambda do: [_value(do)]),
    ("cp_all_gather", context.cp_all_gather, lambda do: [_value(do)]),
    ("to heads", context.to_heads, lambda do: [_value(do)]),
    ("to tokens", context.to_tokens, lambda do: [_value(do)]),
    ("counts", expert.counts, lambda do: [_value(do, (4,), "index")]),
    ("dispatch", expert.dispatch, lambda do: _routed(do)),
    ("combine", expert.combine, lambda do: _routed(do)),
]


def _routed(do: Do) -> list[Value]:
    return [_value(do, (8, 8)), _value(do, (), "host"), _value(do, (4,), "index"), _value(do, (8,), "index")]


@pytest.mark.parametrize(("redistribution", "ins"), [i[1:] for i in IDENTITIES], ids=[i[0] for i in IDENTITIES])
def test_a_redistribution_at_degree_one_is_its_input(
    redistribution: Redistribution, ins: Callable[[Do], list[Value]]
) -> None:
    do = Do(Mesh(Layout()))
    values = ins(do)
    assert do.redistribute(redistribution, *values) is values[0]
    assert do.tape.ops == []


def _calls(model: ModelSpec, layout: Layout) -> Iterator[Call]:
    for stage in range(layout.stages):
        for op in record(model, Mesh(layout), stage, _LENGTH).tape.ops:
            if op.program is not None:
                yield from (*op.program.forward, *op.program.backward)


# Experts are what ep shares: a dense model has no such axis.
_LEGAL = [(m, d, axes) for d, axes in ALONE for m in MODELS if "ep" not in d or m.moe is not None]


@pytest.mark.parametrize(("model", "degrees", "axes"), _LEGAL)
def test_an_axis_alone_talks_alone(model: ModelSpec, degrees: dict[str, Any], axes: set[str]) -> None:
    said = {str(c.site.attrs["axis"]) for c in _calls(model, Layout(**degrees)) if c.phase == "start"}
    expected = axes if model.moe is not None else axes - {"sequence"}
    assert said == expected


@pytest.mark.parametrize("model", MODELS, ids=["dense", "experts", "latent"])
def test_one_rank_issues_no_collective(pool: Pool, model: ModelSpec) -> None:
    case = Case(model, Layout(gradient_accumulation_steps=2))
    assert price(case.compile(0)).wires == {}
    assert pool.run(run_case, case)[0].red == set()  # what is seen on the wires is what is priced
