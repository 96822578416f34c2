"""Every row is a formula that its numbers fulfil, at these sizes and at others, and rows add up to the price."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import process_time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import penteract
from draws import draws
from formula import read
from layouts import Case
from penteract.config.hardware import cluster
from penteract.config.layout import CpMethod, Fusion, Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec, MoESpec
from penteract.config.optimizers import PLAIN, OptimizerKind, OptimizerKinds
from penteract.config.precision.policy import RECIPES, Policy
from penteract.ops.symbols import values
from penteract.parallel.data import SHARD_MULTIPLE
from penteract.readings.estimator import Estimator
from penteract.readings.explain.largest import largest
from penteract.readings.explain.terms import PART_OF, Why
from penteract.readings.explain.why import why
from penteract.readings.price import Price, price
from penteract.schedule.actions import Compute
from penteract.step.program import Program, compile_step
from precisions import BY_NAME
from strategies import FUSES, RECOMPUTES, cases, cast_once_cases, fp8_gather_cases, legal

DENSE = ModelSpec(layers=5, hidden_size=256, heads=16, kv_heads=8, head_size=8, ffn_size=128, vocab_size=256)
EXPERTS = replace(
    DENSE, layers=7, moe=MoESpec(experts=8, top_k=2, ffn_size=96, shared_ffn_size=32, every=2, balance="bias")
)
NARROW = replace(RECIPES["bf16"], reduce="bf16", master="", stochastic=True, moments="int8")
RESIDENT = ("parameters", "gradients", "optimizer", "ring_buffer", "data")
OPTIMIZERS = [PLAIN, OptimizerKinds(matrices=OptimizerKind("muon", 5))]
PHASES = {"forward": "forward", "input gradient": "input_gradient", "weight gradient": "weight_gradient",
          "update": "update"}  # fmt: skip


def kept_before_going_back(p: Program, priced: Price) -> int:
    """Bytes after the last forward in front of the first action that goes back."""
    forward = -1
    for i, action in enumerate(p.actions):
        if isinstance(action, Compute) and action.kind == "Fwd":
            forward = i
        elif str(action)[0] in "BIW":
            break
    return priced.kept[forward][1]


def check_sums(told: Why, p: Program) -> None:
    priced = price(p)
    assert {kind: n for kind in RESIDENT if (n := told.total(kind))} == {k: n for k, n in priced.resident.items() if n}
    flops, wires = Counter[str](), Counter[tuple[str, tuple[int, ...]]]()
    for row in told.rows:
        if row.kind == "flops":
            flops[PHASES[row.detail.removesuffix(" (recomputed)")]] += row.value
        elif row.kind == "wires":
            wires[row.what, row.ranks] += row.value
    assert flops == priced.flops
    assert wires == priced.wires
    if p.layout.offload_optimizer and not p.layout.offload:
        assert told.total("host") == priced.host
    assert told.total("kept") == kept_before_going_back(p, priced)


@draws(10, wide=125)
@given(
    case=cases(),
    precision=st.sampled_from(["fp32", "bf16", NARROW, BY_NAME]),
    of=st.integers(0, 7),
    optimizer_kinds=st.sampled_from(OPTIMIZERS),
)
def test_rows_add_up_to_the_price(
    case: Case, precision: str | Policy, of: int, optimizer_kinds: OptimizerKinds
) -> None:
    assume(case.schedule != "overlapped" or case.layout.zero != 3)  # two passes take turns at gathered units
    rank = of % case.layout.world
    told = why(
        case.model,
        case.layout,
        case.sequence_length,
        precision,
        rank,
        schedule=case.schedule,
        optimizer_kinds=optimizer_kinds,
    )
    p = compile_step(
        case.model, case.layout, case.sequence_length, rank=rank, precision=precision, optimizer_kinds=optimizer_kinds,
        schedule=case.schedule,
    )  # fmt: skip
    check_sums(told, p)
    numbers = values(case.model, case.layout, case.sequence_length)
    for row in told.rows:
        assert read(row.formula, numbers) == read(row.numbers) == row.each > 0, row
        assert row.line or row.detail == "padding" or row.kind == "data", row


@draws(8, wide=100)
@given(cast_once_cases(), st.integers(0, 7))
def test_rows_add_up_where_operands_are_cast_once(case: Case, of: int) -> None:
    rank = of % case.layout.world
    check_sums(why(case.model, case.layout, case.sequence_length, case.precision, rank), case.compile(rank))


@draws(8, wide=100)
@given(fp8_gather_cases(), st.integers(0, 7))
def test_rows_add_up_where_weights_are_gathered_in_fp8(case: Case, of: int) -> None:
    rank = of % case.layout.world
    told, p = why(case.model, case.layout, case.sequence_length, case.precision, rank), case.compile(rank)
    check_sums(told, p)
    assert (
        sum(row.value for row in told.rows if row.detail == "of quantised weights") == 16 * len(p.quantised_weights) > 0
    )


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("layout", [
    Layout(pp=2, gradient_accumulation_steps=6),
    Layout(dp=2, pp=2, vpp=2, schedule="interleaved", gradient_accumulation_steps=4, zero=1),
    Layout(dp=3, schedule="gpipe", gradient_accumulation_steps=3, zero=1, recompute=("*",)),
    Layout(dp=2, pp=2, gradient_accumulation_steps=2, zero=3),
    Layout(tp=16, cp=2, cp_method="ring", schedule="zb_h1"),
], ids=str)  # fmt: skip
def test_layers_that_are_alike_are_counted(model: ModelSpec, layout: Layout) -> None:
    for rank in {0, layout.world - 1}:
        check_sums(why(model, layout, 64, "bf16", rank), compile_step(model, layout, 64, rank=rank, precision="bf16"))


LAYOUTS = (
    Layout(dp=2, tp=2, pp=2, cp=2, gradient_accumulation_steps=4),
    Layout(dp=4, tp=2, cp=2, cp_method="ring", zero=1, recompute=("tp_all_gather", "swiglu")),
    Layout(tp=2, cp=2, cp_method="ulysses", recompute=("*",), gradient_accumulation_steps=2),
    Layout(pp=2, gradient_accumulation_steps=4, recompute=()),
    Layout(dp=2, tp=2, cp=2, loss="chunked"),
)
DEGREES = ("dp", "pp", "cp", "tp", "ep")
CHANGES = (
    {"hidden_size": 512}, {"ffn_size": 512}, {"vocab_size": 1024}, {"heads": 32}, {"kv_heads": 16}, {"head_size": 16},
    {"micro_batch_size": 3}, {"gradient_accumulation_steps": 8}, {"dp": 8}, {"tp": 4},
)  # fmt: skip


def is_the_same_program(layout: Layout, change: dict[str, int]) -> bool:
    """An axis of one rank says nothing; of several it does."""
    return not any(name in ("dp", "tp") and getattr(layout, name) == 1 for name in change)


def check_other_sizes(told: Why, other: Case) -> None:
    """The formulas of one price, at the sizes of another, give the other: they are no transcripts."""
    at = values(other.model, other.layout, other.sequence_length)
    found = Counter[str]()
    for row in told.rows:
        assert row.detail != "padding"
        found[row.kind] += row.count * row.flight * int(read(row.formula, at))
    p = compile_step(
        other.model, other.layout, other.sequence_length, precision="bf16", schedule=other.schedule
    )  # fmt: skip
    priced = price(p)
    assert {kind: n for kind in RESIDENT if (n := found[kind])} == priced.resident
    assert found["flops"] == priced.total_flops
    assert found["wires"] == sum(priced.wires.values())
    assert found["kept"] == kept_before_going_back(p, priced)


@pytest.mark.parametrize(
    ("change", "layout"),
    [c for c in product((*CHANGES, {"sequence_length": 256}), LAYOUTS) if is_the_same_program(c[1], c[0])],
    ids=str,
)
def test_formulas_hold_at_other_sizes(change: dict[str, int], layout: Layout) -> None:
    (name, n), length = *change.items(), change.get("sequence_length", 64)
    model = replace(DENSE, **change) if hasattr(DENSE, name) else DENSE
    other = replace(layout, **change) if hasattr(layout, name) else layout
    assert n in values(model, other, length).values()
    check_other_sizes(why(DENSE, layout, 64, "bf16"), Case(model, other, length))


@draws(20, wide=250)
@given(
    st.fixed_dictionaries({n: st.sampled_from([1, 2]) for n in DEGREES}),
    st.fixed_dictionaries({n: st.sampled_from([2, 4, 8]) for n in ("dp", "cp", "tp", "ep")}),
    st.sampled_from(["all_gather", "ulysses"]), st.sampled_from(RECOMPUTES), st.sampled_from(FUSES), st.booleans(),
)  # fmt: skip
def test_formulas_of_drawn_layouts_hold_at_other_degrees(
    degrees: dict[str, int], others: dict[str, int], cp_method: CpMethod, recompute: tuple[str, ...],
    fuse: tuple[Fusion, ...], experts: bool,
) -> None:  # fmt: skip
    """A degree of 1 is in no formula, as no program of it has its collectives; the others may be any that is legal."""
    model, more = EXPERTS if experts else DENSE, {n: k for n, k in others.items() if degrees[n] > 1}
    layout = Layout(**degrees, cp_method=cp_method, recompute=recompute, fuse=fuse, gradient_accumulation_steps=4)
    case, other = Case(model, layout, 128), Case(model, replace(layout, **more), 128)
    assume(legal(case) and legal(other))
    told = why(model, layout, 128, "bf16")
    assert not {n for row in told.rows for n in row.names if degrees.get(n) == 1}
    check_other_sizes(told, other)


def test_padding_is_a_row_and_small() -> None:
    layout = Layout(dp=3, zero=1)
    padding = [r for r in why(DENSE, layout, 48, "bf16").rows if r.detail == "padding"]
    count = len(compile_step(DENSE, layout, 48, precision="bf16").buckets)
    assert {r.kind for r in padding} == {"parameters", "gradients", "optimizer", "wires"}
    assert all(0 < r.value <= 12 * count * 3 * SHARD_MULTIPLE for r in padding)


@pytest.mark.alone
def test_a_large_model_is_quick() -> None:
    m = ModelSpec(
        layers=32, hidden_size=4096, heads=32, kv_heads=8, head_size=128, ffn_size=14336, vocab_size=128256
    )  # fmt: skip
    layout = Layout(dp=8, tp=8, pp=4, cp=2, gradient_accumulation_steps=32, zero=1)
    before = process_time()
    why(m, layout, 8192, "bf16")
    assert process_time() - before < 0.5


def test_text_and_json() -> None:
    layout = Layout(dp=2, tp=2, pp=2, gradient_accumulation_steps=4)
    told = why(DENSE, layout, 64, "bf16")
    told = told.whole(told.total("kept") + 2**20, told.total("data"))
    text = told.text(("parameters", "kept", "temporary"), width=100)
    assert "layers.*.mlp.gate.weight [F/tp, D]" in text
    assert "3 × 2·D·F/tp = 3 × 2·256·128/2" in text
    assert "for swiglu's input gradient" in text and "2 in flight × " in text
    assert "model/mlp.py:" in text and "F = 128 MLP hidden size" in text
    assert (
        "\ntemporary activations, peak  1.00 MiB (part of activations)" in text
        and "1.00 MiB temporary" in text
        and "FLOP" not in text
        and "V = 256 vocabulary" in text
    )
    assert all(len(line) <= 100 for line in text.splitlines())
    whole = told.as_dict()
    assert json.loads(json.dumps(whole)) == whole
    assert sum(r["value"] for r in whole["rows"] if r["kind"] == "parameters") == told.total("parameters")
    for heading in ("parameters", "gradients", "optimizer", "inputs", "activations saved for backward",
                    "FLOPs per rank and step", "communication, bytes per rank and step"):  # fmt: skip
        assert f"\n{heading}  " in "\n" + told.text()


def test_the_largest_parts_and_the_rest_are_the_whole() -> None:
    """Chunks of a stage, matrices of a module and collectives of parameters are one part each."""
    told = why(DENSE, Layout(dp=2, tp=2, pp=2, gradient_accumulation_steps=4, zero=1), 64, "bf16")
    for kinds in (("parameters",), ("flops",), ("wires",), ("parameters", "kept", "data")):
        found = largest(told, kinds, 3)
        assert found.total == sum(told.total(kind) for kind in kinds)
        assert [part.value for part in found.parts] == sorted((part.value for part in found.parts), reverse=True)
        every = largest(told, kinds, 100)
        assert (every.others, every.rest) == (0, 0) and found.parts == every.parts[:3]
        assert found.rest == sum(part.value for part in every.parts[3:]) and found.others == len(every.parts) - 3
    matrices = [row.value for row in told.rows if row.kind == "parameters" and ".mlp." in row.what]
    parameters = {part.name: part for part in largest(told, ("parameters",), 100).parts}
    assert parameters["layers.*.mlp.*"].value == sum(matrices) and len(matrices) == 3
    assert parameters["layers.*.mlp.*"].line == "model/mlp.py" and "layers.*.norm1.weight" in parameters
    wires = [part.name for part in largest(told, ("wires",), 100).parts]
    assert "reduce_scatter gradients of parameters" in wires and "all_gather updated parameters" in wires
    assert len(wires) == len(set(zip(wires, [p.line for p in largest(told, ("wires",), 100).parts], strict=True)))


SHARDED = [Layout(dp=4, zero=zero, gradient_accumulation_steps=2) for zero in (2, 3)]  # with ring buffers


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[3], *SHARDED], ids=str)
def test_the_whole_is_what_a_plan_sums_up(layout: Layout) -> None:
    """Of the fullest rank, rows and the estimate's memory have the same sums under the same names."""
    estimate = Estimator(DENSE, cluster(f"{layout.world}xH200"), sequence_length=64, precision="bf16").estimate(layout)
    fullest = estimate.by_pp_rank.index(max(estimate.by_pp_rank))
    rank = Mesh(layout).group("pp", 0)[fullest]
    told = why(DENSE, layout, 64, "bf16", rank).whole(estimate.memory["activations"], estimate.memory["other"])
    found = Counter[str]()
    for row in told.rows:
        if row.kind not in ("flops", "wires"):
            assert row.value > 0
            found[PART_OF.get(row.kind, row.kind)] += row.value
    assert found == Counter(estimate.memory)
    assert found.total() == estimate.allocated


def test_a_line_is_the_program_s_own() -> None:
    """The line that a row names holds the op that it is about."""
    root = Path(penteract.__file__).parent
    for row in why(DENSE, Layout(), 64).rows:
        file, _, number = row.line.partition(":")
        if row.kind == "flops" and row.what == "linear":
            assert "do.linear" in (root / file).read_text(encoding="utf-8").splitlines()[int(number) - 1]
