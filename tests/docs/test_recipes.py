"""The recipes at the end of ARCHITECTURE.md are followed: each builds its example, and nothing else has to know it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import oracle
from engine.hf import families, forward
from layouts import CPU, Case, Subject, Verdict, _prepare, run_case
from op_kernels import cases as trials
from op_kernels import trial
from op_kernels.formulas import FORMULAS, Room, Truth
from penteract.api import plan
from penteract.config import catalog, hf
from penteract.config.catalog import hardware as hardware_catalog
from penteract.config.files import keys as file_keys
from penteract.config.files.sections import Parallel
from penteract.config.hardware import cluster
from penteract.config.hf import write_config
from penteract.config.hf.families import sizes
from penteract.config.hf.fields import Fields
from penteract.config.layout import Layout
from penteract.config.mesh import AXES, Axis, Mesh
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN
from penteract.config.precision.policy import RECIPES
from penteract.config.resolve import resolved_run as resolving
from penteract.config.resolve.presets import preset
from penteract.config.resolve.write_run_file import template, to_toml
from penteract.config.rules.legal import problems
from penteract.engine.comm.groups import ProcessGroups
from penteract.engine.hf.folder import open_folder
from penteract.engine.kernels import dense as dense_kernels
from penteract.engine.kernels.kernel import Env, Tensors, TorchKernel
from penteract.engine.kernels.reference import REFERENCE
from penteract.engine.kernels.registry import kernel, kernels
from penteract.errors import BadInput, Bug
from penteract.model import block, hf_families
from penteract.model.count import parameters
from penteract.model.hf_families import HfFamily, HfLocation
from penteract.ops.declarations import OPS, Implementation, OpDeclaration
from penteract.ops.declarations.declaration import CallShapes
from penteract.ops.declarations.registry import Op
from penteract.ops.do import Do, Value, single_collective
from penteract.ops.params import Param, Shard
from penteract.ops.tape import Site
from penteract.readings.composed import Composer
from penteract.readings.costs.rates import Rates
from penteract.readings.price import price
from penteract.readings.time import ops
from penteract.readings.time.cost import DIMENSION
from penteract.readings.time.lower_bounds import bounds
from penteract.readings.time.step import StepClock
from penteract.schedule.actions import Compute, ComputeList, P2PBatch
from penteract.schedule.check import check
from penteract.schedule.draw import draw
from penteract.schedule.registry import SCHEDULES, generate
from penteract.schedule.schedule import Schedule, round_robin
from penteract.schedule.transfers import with_transfers
from penteract.step import program
from penteract.step.walk import walk
from pool import Pool
from readings.test_composed import check as equals_the_walk
from tiny import SIZES

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "penteract"
SECTION = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("\n## Where to add …\n")[1]
RECIPES_OF = ("a model", "a dimension", "a schedule", "an op", "a kernel", "a GPU", "a mutation test")
DENSE = ModelSpec(**SIZES)
GELU = replace(DENSE, activation="gelu")


# ---- the page ----------------------------------------------------------------------------------------------------


def test_the_section_is_the_last_and_has_these_recipes() -> None:
    assert "\n## " not in SECTION
    assert tuple(re.findall(r"^### … (.+)$", SECTION, re.MULTILINE)) == RECIPES_OF


@pytest.mark.parametrize("name", RECIPES_OF)
def test_a_recipe_is_three_to_six_steps_and_a_test(name: str) -> None:
    recipe = SECTION.split(f"### … {name}\n")[1].split("\n### ")[0]
    steps = re.findall(r"^(\d)\. ", recipe, re.MULTILINE)
    assert 3 <= len(steps) <= 6
    assert steps == [str(i + 1) for i in range(len(steps))]
    assert re.search(r"`tests/[\w/]+\.py`", recipe)


def test_what_the_recipes_name_exists() -> None:
    files = set(re.findall(r"`([\w/]+/[\w./]*(?:\.py|\.toml|\.json|/))`", SECTION))
    assert len(files) > 30
    assert [f for f in files if not any((at / f).exists() for at in (SOURCE, ROOT))] == []
    code = "\n".join(p.read_text(encoding="utf-8") for at in (SOURCE, ROOT / "tests") for p in at.rglob("*.py"))
    code = code.replace(Path(__file__).read_text(encoding="utf-8"), "")
    names = set(re.findall(r"`([A-Za-z_]{3,})`", SECTION))
    assert [n for n in names if not re.search(rf"\b{n}\b", code)] == []


# ---- a model -----------------------------------------------------------------------------------------------------

YI = """
[[series]] # 2403.04652
kv_heads = 4
head_size = 128
vocab_size = 64_000
max_positions = 4096
rope_theta = 5e6
norm_epsilon = 1e-5

[series.models."yi-6b"]
source = "01-ai/Yi-6B"
parameters = 6_061_035_520
layers = 32
hidden_size = 4096
heads = 32
ffn_size = 11_008
"""


def test_a_published_model_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a new family: a file, and no list that names it."""
    before = catalog.names()
    folder = tmp_path / "models"
    shutil.copytree(catalog.FOLDER, folder)
    (folder / "yi.toml").write_text(YI)
    monkeypatch.setattr(catalog, "FOLDER", folder)
    entry = catalog.entry("01-ai/Yi-6B")
    assert set(catalog.names()) == {*before, "yi-6b"}
    assert parameters(entry.model).total == entry.parameters
    assert preset("yi-6b").model == entry.model
    assert plan("yi-6b", "8xH100", sequence_length=4096, batch="64seqs").best.layout.world == 8
    with pytest.raises(BadInput, match="use yi-6b"):
        catalog.entry("yi-7b")


def phi3(f: Fields) -> ModelSpec:
    return ModelSpec(**sizes(f), sliding_window=f.get("sliding_window", "model.sliding_window", 0))


def to_phi3(m: ModelSpec) -> dict[str, Any]:
    return write_config.WRITERS["mistral"][1](m)


def places_of_phi3(m: ModelSpec) -> dict[str, HfLocation]:
    """As Llama; queries, keys and values are one matrix, and so are gate and up."""
    found = dict(hf_families.FAMILIES["llama"].places(m))
    q, kv = m.heads * m.head_size, m.kv_heads * m.head_size
    qkv, gate_up = ("self_attn.qkv_proj", q + 2 * kv), ("mlp.gate_up_proj", 2 * m.ffn_size)
    fused = [("attention.q", 0, *qkv), ("attention.k", q, *qkv), ("attention.v", q + kv, *qkv),
             ("mlp.gate", 0, *gate_up), ("mlp.up", m.ffn_size, *gate_up)]  # fmt: skip
    for ours, first, theirs, rows in fused:
        found[f"{ours}.weight"] = HfLocation(f"model.layers.{{i}}.{theirs}.weight", first=first, rows=rows)
    return found


@pytest.fixture
def phi3_known() -> Iterator[None]:
    with (
        patch.dict(hf.READERS, {"phi3": phi3}),
        patch.dict(hf_families.FAMILIES, {"phi3": HfFamily(places_of_phi3)}),
        patch.dict(write_config.WRITERS, {"phi3": ("Phi3ForCausalLM", to_phi3)}),
    ):
        yield


@pytest.mark.usefixtures("phi3_known")
def test_a_family_of_hugging_face_is_a_reader_names_and_a_writer(tmp_path: Path) -> None:
    """Logits of a folder that transformers wrote are those that transformers computes."""
    about = {"vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
             "sliding_window": 5}  # fmt: skip
    with families.exact():
        torch.manual_seed(1)
        config = families.transformers().AutoConfig.for_model("phi3", **about)
        theirs = families.transformers().AutoModelForCausalLM.from_config(config, **families.PLAIN).eval()
        with torch.no_grad():
            for name, weight in theirs.named_parameters():
                weight.normal_(float("norm" in name), 0.3)
        theirs.save_pretrained(tmp_path / "phi3")
        wanted = families.logits(theirs)
    model = open_folder(tmp_path / "phi3").model
    mine = forward.logits(0, ProcessGroups(), tmp_path / "phi3", model, Layout(), families.TOKENS, "fp64")
    found = forward.joined([mine])
    assert (found - wanted).abs().max() < 1e-10 * wanted.abs().max()
    written = {"model_type": "phi3", "_name_or_path": model.name, **to_phi3(model)}
    assert hf.model_from_hf(json.loads(json.dumps(written))) == model


# ---- a dimension -------------------------------------------------------------------------------------------------
# FFN columns over neighbours of dp·cp that hold other tokens: `parallel/ffn.py`, as it would be.


@dataclass(frozen=True, kw_only=True)
class Wider(Layout):
    """`config/layout.py` with one more degree, which folds over dp·cp."""

    ffn: int = 1


FFN = Axis(lambda lay: getattr(lay, "ffn", 1), lambda lay: lay.tp, crosses=True)  # an entry of `AXES`
enter_ffn = single_collective(
    "enter_ffn", "ffn", "all_gather", "reduce_scatter"
)  # [S@cp, B, D] of each -> of all, one after another
leave_ffn = single_collective("leave_ffn", "ffn", "reduce_scatter", "all_gather")


def columns(do: Do, m: ModelSpec, name: str, x: Value, ffn_size: int) -> Value:
    """As `mlp` in `model/mlp.py`, with columns over `ffn` besides."""

    def cut(which: str, shape: tuple[int, int], dim: int) -> Param:
        shards = (Shard(dim, "ffn"),)
        scale = m.residual_std if dim else m.initial_std
        return Param(f"{name}.{which}.weight", shape, shards, scale=scale, matrix=True)

    up, down = (ffn_size, m.hidden_size), (m.hidden_size, ffn_size)
    hg, hu = do.fork(do.redistribute(enter_ffn, x))
    h = do.swiglu(do.linear(hg, cut("gate", up, 0)), do.linear(hu, cut("up", up, 0)))
    return do.redistribute(leave_ffn, do.linear(h, cut("down", down, 1)))


@dataclass(frozen=True, kw_only=True)
class WiderParallel(Parallel):
    """`config/files/sections.py` with its key."""

    ffn: int = 1


@contextmanager
def ffn_known() -> Iterator[None]:
    axes = (*ops.AXES, "ffn")
    with (
        patch.object(program, "REDISTRIBUTIONS", (*program.REDISTRIBUTIONS, enter_ffn, leave_ffn)),
        patch.dict(AXES, {"ffn": FFN}),
        patch.dict(DIMENSION, {"ffn": "tensor"}),
        patch.object(ops, "AXES", axes),
        patch.object(bounds, "AXES", axes),
        patch.object(block, "mlp", columns),
    ):
        yield


def run_wider(rank: int, groups: ProcessGroups, case: Case) -> Verdict:
    with ffn_known():
        return run_case(rank, groups, case)


WIDER = [
    Wider(dp=2, ffn=2),
    Wider(dp=2, cp=2, ffn=2, micro_batch_size=2, gradient_accumulation_steps=2, zero=3),
    Wider(dp=2, pp=2, ffn=2, gradient_accumulation_steps=2, zero=1),
    Wider(dp=4, ffn=4, recompute=("*",)),
    Wider(dp=2, ffn=2, recompute=("enter_ffn", "swiglu")),
]


@contextmanager
def key_known() -> Iterator[None]:
    with (
        patch.dict(file_keys.SECTIONS, {"parallel": WiderParallel}),
        patch.dict(file_keys._ABOUT, {"parallel.ffn": ("FFN columns over dp·cp", 1, 2**48)}),
        patch.object(resolving, "Layout", Wider),
    ):
        file_keys.keys.cache_clear()
        yield
    file_keys.keys.cache_clear()


def test_a_dimension_has_a_key_of_run_files(tmp_path: Path) -> None:
    """Read, shown with its meaning, written and read again."""
    with key_known():
        found = resolving.resolve(overrides=["--parallel.dp=4", "--parallel.ffn=2"])
        assert found.run.layout == Wider(dp=4, ffn=2, **{"micro_batch_size": 4, "loss": "chunked"})
        assert "# ffn = 1  # FFN columns over dp·cp" in template()
        (tmp_path / "run.toml").write_text(to_toml(found))
        assert resolving.resolve(tmp_path / "run.toml").run == found.run
    with pytest.raises(BadInput, match="unknown key"):
        resolving.resolve(overrides=["--parallel.ffn=2"])


@pytest.mark.parametrize("layout", WIDER, ids=repr)
def test_a_dimension_is_an_axis_and_where_it_is_crossed(pool: Pool, layout: Wider) -> None:
    """Gradients are the oracle's; wires, FLOPs and kept bytes are those priced; who reduces follows from the cuts."""
    red = [f"rank {rank}: {v}" for rank, v in enumerate(pool.run(run_wider, Case(DENSE, layout))) if v.red]
    assert not red, "\n".join(red)


def test_a_dimension_is_priced_by_layers_and_timed() -> None:
    with ffn_known():
        assert Mesh(WIDER[1]).group("ffn", 3) == (2, 3)
        equals_the_walk(DENSE, WIDER[2], 16, RECIPES["bf16"], PLAIN)
        node = cluster("8xH100")
        steps = StepClock(Composer(DENSE, 16, "bf16"), node, Rates.of(node, "bf16"))
        assert 0 < steps.seconds(Wider(dp=2)) < steps.seconds(Wider(dp=2, ffn=2))
    assert "ffn" not in AXES


# ---- a schedule --------------------------------------------------------------------------------------------------


def _in_waves(pp: int, vpp: int, micro_batches: int) -> list[ComputeList]:
    """GPipe over pp micro-batches, again and again: at most pp of them are in flight."""
    one: ComputeList = []
    for first in range(0, micro_batches, pp):
        some = range(first, min(first + pp, micro_batches))
        one += [*(Compute("Fwd", m) for m in some), *(Compute("Bwd", m) for m in some)]
    return [list(one) for _ in range(pp)]


WAVES = Schedule(name="waves", compute=_in_waves, needs_multiple_of_pp=True, period=lambda pp, vpp: pp)


@contextmanager
def waves_known() -> Iterator[None]:
    with patch.dict(SCHEDULES, {WAVES.name: WAVES}):
        yield


def run_waves(rank: int, groups: ProcessGroups, case: Case) -> Verdict:
    with waves_known():
        return run_case(rank, groups, case)


def test_a_schedule_is_one_value(pool: Pool) -> None:
    """Proven, drawn, legal or blamed, priced, timed, planned and run."""
    layout = Layout(pp=2, schedule="waves", gradient_accumulation_steps=4, dp=2, zero=1)
    with waves_known():
        lists, placement = generate("waves", 2, 1, 4), round_robin(2, 1)
        report = check(with_transfers(lists, placement), placement, 4)
        assert report.in_flight_peak == (2, 2)
        assert draw(lists, placement, 4).splitlines() == [
            "rank 0  F0 F1 .. .. .. B0 -- B1 -- F2 F3 .. .. .. B2 -- B3 --",
            "rank 1  .. F0 F1 B0 -- B1 -- .. .. .. F2 F3 B2 -- B3 -- .. ..",
            "bubble 33.3% of 18 time units (F: 1; B: 2, with --); peak micro-batches in flight by rank: 2 2",
        ]
        assert not problems(DENSE, layout, 16)
        assert problems(DENSE, replace(layout, gradient_accumulation_steps=3), 16)
        equals_the_walk(DENSE, layout, 16, RECIPES["bf16"], PLAIN)
        node = cluster("8xH100")
        composer, rates = Composer(DENSE, 16, "bf16"), Rates.of(node, "bf16")
        long = replace(layout, gradient_accumulation_steps=40)
        jumped = StepClock(composer, node, rates).seconds(long)
        assert jumped == StepClock(composer, node, rates, skip_repeats=False).seconds(long)
        found = plan("tiny", "8xH100", sequence_length=256, batch="64seqs", fix="pp=2,schedule=waves")
        assert {timed.layout.schedule for timed in found.layouts} == {"waves"}
    assert not [v for v in pool.run(run_waves, Case(DENSE, layout)) if v.red]


# ---- an op -------------------------------------------------------------------------------------------------------


class SquaredRelu(OpDeclaration):
    """max(x, 0)² (So 2021, 2109.08668)"""

    input_keeps = ("in0",)


def squared_relu(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    torch.clamp(ins[0], min=0, out=outs[0])
    outs[0].square_()


def squared_relu_input(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    torch.clamp(ins[0], min=0, out=outs[0])
    outs[0].mul_(ins[1]).mul_(2)


def formula(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    return Truth([torch.relu(ins[0]) ** 2])


RELU = TorchKernel(squared_relu, squared_relu_input)


@contextmanager
def op_known() -> Iterator[None]:
    """An entry of `DENSE` in the declarations, one in the kernels; and the network says it where it said GELU."""
    table = "penteract.engine.kernels.dense:DENSE"
    declared = SquaredRelu()
    reference = Implementation("reference", lambda site, layout: declared, {"cpu": table, "cuda": table})

    def instead(self: Do, x: Value) -> Value:
        return self.op("squared_relu", x)[0]

    with ExitStack() as stack:
        stack.enter_context(patch.dict(OPS, {"squared_relu": Op(declared, (reference,))}))
        stack.enter_context(patch.dict(dense_kernels.DENSE, {"squared_relu": RELU}))
        stack.enter_context(patch.dict(REFERENCE, {"squared_relu": RELU}))
        stack.enter_context(patch.dict(FORMULAS, {"squared_relu": formula}))
        stack.enter_context(patch.object(Do, "gelu", instead))
        stack.enter_context(patch.object(oracle.F, "gelu", lambda x, approximate: torch.relu(x) ** 2))
        yield


def run_op(rank: int, groups: ProcessGroups, case: Case) -> Verdict:
    with op_known():
        return run_case(rank, groups, case)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_an_op_is_a_declaration_and_a_kernel(precision: str) -> None:
    """Values, gradients, what it keeps and allocates: by the trial that every op is put to."""
    with op_known():
        rows = trials.Case("squared_relu", "rows", (trials.x(4, 2, 5),))
        assert trial.check(rows, precision) == []
        roomy = type("Roomy", (SquaredRelu,), {"workspace": lambda self, *about: 8})()
        assert any("workspace" in said for said in trial.check(rows, precision, roomy))
        needless = type("Needless", (SquaredRelu,), {"input_keeps": ("in0", "out0")})()
        assert trial.check(rows, precision, needless)


def test_an_op_is_recorded_priced_and_run(pool: Pool) -> None:
    layout = Layout(tp=2, recompute=("squared_relu",))
    with op_known():
        p = Case(GELU, layout).compile(0)
        said = [op.site for op in p.chunks[0].tape.ops if op.site.op_name == "squared_relu"]
        assert [site.layer for site in said] == [0, 1]
        assert all(site.line.startswith("model/mlp.py:") or "test_recipes" in site.line for site in said)
        equals_the_walk(GELU, layout, 16, RECIPES["bf16"], PLAIN)
        assert sum(bytes_ for _, bytes_ in price(p).kept) < sum(
            bytes_ for _, bytes_ in price(Case(GELU, Layout(tp=2, recompute=())).compile(0)).kept
        )
    assert not [v for v in pool.run(run_op, Case(GELU, layout)) if v.red]
    with pytest.raises(BadInput, match="no op of the program"):
        Case(GELU, layout).compile(0)


# ---- a kernel ----------------------------------------------------------------------------------------------------


LATE = 0.1  # seconds: more than the host needs to launch all of the step


class Fused(type(OPS["swiglu"].declaration)):
    """As the op declares it, but slow: seen in a time."""

    def cost(self, rates: Any, call: CallShapes, widths: Any, registers: Any) -> tuple[str, float]:
        return "pointwise", LATE


calls: list[str] = []


def fused(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
    calls.append(site.op_name)
    torch.mul(ins[0] * torch.sigmoid(ins[0]), ins[1], out=outs[0])


KERNELS = {"swiglu": TorchKernel(fused, REFERENCE["swiglu"].input_gradient)}


@cache
def fused_declaration() -> Fused:
    return Fused()


def test_a_kernel_is_an_implementation_that_a_layout_chooses() -> None:
    """By the key that a run file has for it. It keeps what the reference keeps, and is priced and timed as declared."""
    entry = Implementation(
        "fused", lambda site, layout: fused_declaration() if layout.elementwise == "triton" else None,
        {"cpu": f"{__name__}:KERNELS"},
    )  # fmt: skip
    plain = {name: op._replace(implementations=op.implementations[-1:]) for name, op in OPS.items()}
    op = plain["swiglu"]
    cases = {name: Case(DENSE, Layout(elementwise=name)) for name in ("reference", "triton")}
    with patch.dict(OPS, plain | {"swiglu": op._replace(implementations=(entry, *op.implementations))}):
        assert kernel("swiglu", entry, "cpu") is KERNELS["swiglu"]
        gradients, prices = {}, {}
        for name, case in cases.items():
            p = case.compile(0)
            calls.clear()
            run = _prepare(p, ProcessGroups(), kernels(p, CPU))
            walk(p, run, targets_counted=False)
            assert len(calls) == (DENSE.layers if name == "triton" else 0)
            gradients[name] = {n: x.clone() for n, x in run.state.gradients.items()}
            prices[name] = price(p)
        for n, x in gradients["reference"].items():
            torch.testing.assert_close(gradients["triton"][n], x, rtol=1e-9, atol=1e-12)
        assert prices["triton"].kept == prices["reference"].kept
        node = cluster("8xH100")
        steps = StepClock(Composer(DENSE, 16, "bf16"), node, Rates.of(node, "bf16"))
        took = {name: steps.seconds(case.layout) for name, case in cases.items()}
        assert took["triton"] - took["reference"] > DENSE.layers * LATE


# ---- a GPU -------------------------------------------------------------------------------------------------------

GPU = """
[B300]
memory_gib = 267.7
bf16 = 2250.0
tf32 = 1125.0
fp32 = 75.0
fp8 = 4500.0
fp64 = 1.25
hbm = 8000.0
host_link = 126.0
multiprocessors = 148
aliases = ["B300-SXM"]
source = "a table of this test"
"""
FABRIC = """
[infiniband-xdr]
gb_per_second = 100.0
latency_us = 5.0
domain = 0
efficiency = 0.85
aliases = ["xdr"]
source = "a table of this test"
"""
NODE = """
[B300]
gpus_per_node = 8
inside = "nvlink5"
between = "infiniband-xdr"
"""


def test_a_gpu_is_three_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hardware"
    shutil.copytree(hardware_catalog.FOLDER, folder)
    for name, text in (("gpus", GPU), ("fabrics", FABRIC), ("nodes", NODE)):
        with (folder / f"{name}.toml").open("a", encoding="utf-8") as file:
            file.write(text)
    monkeypatch.setattr(hardware_catalog, "FOLDER", folder)
    found = cluster("16xb300-sxm")
    assert (found.name, found.gpus_per_node, found.memory_gib, found.curves) == ("2x8xB300", 8, 267.7, None)
    assert found.between is not None and found.between.name == "infiniband-xdr"
    best = plan("llama-3.1-8b", "16xB300", sequence_length=8192, batch="128seqs").best
    slower = plan("llama-3.1-8b", "16xH100", sequence_length=8192, batch="128seqs").best
    assert best.layout.world == 16 and best.time.seconds < slower.time.seconds
    monkeypatch.undo()
    with pytest.raises(BadInput, match="no such GPU"):
        cluster("16xB300")


# ---- a mutation test ---------------------------------------------------------------------------------------------


def swiglu_of_the_wrong_sign(s: Subject) -> None:
    """A fault of a step: a function that changes the program, its kernels or a rule before the step runs."""
    real = s.kernels["swiglu"].forward

    def turned(env: Env, site: Site, ins: Tensors, weights: Tensors, outs: Tensors) -> None:
        real(env, site, ins, weights, outs)
        outs[0].neg_()

    s.kernels["swiglu"] = TorchKernel(turned, s.kernels["swiglu"].input_gradient)


def test_a_fault_of_a_step_turns_one_comparison_red(pool: Pool) -> None:
    case = Case(DENSE, Layout(dp=2))
    assert not set().union(*(v.red for v in pool.run(run_case, case)))
    assert set().union(*(v.red for v in pool.run(run_case, case, swiglu_of_the_wrong_sign))) == {"values"}


def test_a_fault_of_a_schedule_is_named() -> None:
    """Lists that would deadlock: what rank 1 sends waits for what it has not received."""
    placement = round_robin(2, 1)
    lists = with_transfers(generate("1f1b", 2, 1, 3), placement)
    at = next(i for i, a in enumerate(lists[1]) if isinstance(a, P2PBatch) and len(a.transfers) == 2)
    late = [*lists[1][:at], *lists[1][at + 1 :], lists[1][at]]
    check(lists, placement, 3)
    with pytest.raises(Bug, match="SCHEDULE"):
        check([lists[0], late], placement, 3)
