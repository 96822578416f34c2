"""Legality against a second statement of the rules, and repairs that repair."""

import json
import time
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penteract.config.layout import CP_METHODS, Layout
from penteract.config.model import LatentSpec, ModelSpec, MoESpec
from penteract.config.resolve.presets import TINY, TINY_MOE, preset
from penteract.config.rules.breaches import breaches
from penteract.config.rules.case import Case
from penteract.config.rules.legal import BadLayout, check_legal, problems
from penteract.config.rules.nearest import repair
from penteract.config.rules.settle import Settle
from penteract.schedule.registry import SCHEDULES

SMALL = st.integers(1, 9)

EXPERTS = st.builds(
    MoESpec, experts=SMALL, top_k=st.integers(1, 3), ffn_size=st.sampled_from([6, 8, 12]),
    shared_ffn_size=st.sampled_from([0, 4, 12]), groups=st.sampled_from([1, 1, 2, 3, 4]), top_groups=st.integers(1, 3),
    group_score=st.sampled_from(["max", "top2"]),
)  # fmt: skip
LATENTS = st.builds(
    LatentSpec, kv_rank=SMALL, plain_size=st.sampled_from([1, 2]), rope_size=st.sampled_from([1, 2]),
    value_size=SMALL, query_rank=st.integers(0, 4),
)  # fmt: skip
MODELS = st.builds(
    ModelSpec, layers=SMALL, hidden_size=st.just(24), heads=st.sampled_from([4, 6, 8, 12]),
    kv_heads=st.sampled_from([1, 2, 3, 4]), head_size=st.sampled_from([3, 4]), ffn_size=st.sampled_from([12, 16, 24]),
    vocab_size=st.sampled_from([16, 23, 24]), positions=st.sampled_from(["rope", "learned"]),
    max_positions=st.sampled_from([16, 48]), moe=st.none() | EXPERTS,
    latent=st.none() | st.none() | LATENTS, qk_norm=st.booleans(), mtp_layers=st.integers(0, 2),
)  # fmt: skip
DEGREES = st.integers(-1, 9)
LAYOUTS = st.builds(
    Layout, dp=DEGREES, tp=DEGREES, pp=DEGREES, cp=DEGREES, ep=DEGREES, vpp=DEGREES, expert_tp=DEGREES,
    last_stage_less_layers=st.just(0) | st.integers(-1, 4),
    schedule=st.sampled_from(tuple(SCHEDULES)), cp_method=st.sampled_from(CP_METHODS),
    micro_batch_size=DEGREES, gradient_accumulation_steps=DEGREES,
)  # fmt: skip
SHARDED = st.builds(
    replace, LAYOUTS, zero=st.integers(-1, 4), shard_group=st.integers(-1, 9), reduce_scatter_once=st.booleans(),
    reshard_after_step=st.booleans(),
)  # fmt: skip
CASES = st.builds(
    Case, model=MODELS, layout=LAYOUTS | LAYOUTS | SHARDED, sequence_length=st.integers(0, 60),
    global_batch_size=st.none() | st.integers(0, 40), world=st.none() | st.integers(1, 24),
)  # fmt: skip
SETTLES = st.builds(
    Settle, open=st.frozensets(st.sampled_from(["dp", "micro_batch_size"])), largest_micro_batch=st.integers(1, 5)
)  # fmt: skip


WORDS = {"schedule": "1f1c", "cp_method": "rnig", "attention": "flsh", "loss": "chunkd", "elementwise": "trtion",
         "experts": "gruoped", "fuse": ("nrom", "mlp")}  # fmt: skip


@pytest.mark.parametrize(("setting", "word"), WORDS.items())
def test_a_word_that_no_setting_has_is_refused(setting: str, word: object) -> None:
    """A layout made in Python has no parser before it."""
    layout = replace(Layout(), **{setting: word})
    with pytest.raises(BadLayout, match="no such") as caught:
        check_legal(TINY_MOE, layout, 16)
    (problem,) = caught.value.problems
    assert problem.setting == setting and problem.allowed
    assert not problems(TINY_MOE, replace(layout, **{setting: problem.allowed[0]}), 16)
    assert f"--{problem.key} " in problem.fix and "(" not in problem.fix


def routable(moe: MoESpec) -> bool:
    """Whether every token finds top_k experts in its best groups."""
    each = Fraction(moe.experts, moe.groups)
    return (
        each.denominator == 1
        and moe.top_k <= min(moe.experts, moe.top_groups * each)
        and moe.top_groups <= moe.groups
        and (moe.groups == 1 or moe.group_score == "max" or each >= 2)
    )


def legal(case: Case) -> bool:
    """The rules again, as one formula a dimension."""
    m, lay, s = case.model, case.layout, case.sequence_length
    counts = [lay.dp, lay.tp, lay.pp, lay.cp, lay.ep, lay.vpp, lay.expert_tp, lay.micro_batch_size,
              lay.gradient_accumulation_steps, lay.bucket_bytes + 1, s]  # fmt: skip
    if min(counts) < 1:
        return False
    if m.heads % m.kv_heads or (m.moe and not routable(m.moe)):
        return False
    turned = m.latent.rope_size if m.latent else m.head_size
    if m.positions == "rope" and turned % 2:
        return False
    if m.latent and (m.head_size - turned != m.latent.plain_size or m.kv_heads != m.heads or m.qk_norm):
        return False
    if m.positions == "learned" and s > m.max_positions:
        return False
    shared = m.moe.shared_ffn_size if m.moe else 0
    tensor = all(n % lay.tp == 0 for n in (m.heads, m.ffn_size, m.vocab_size, shared)) and (
        m.kv_heads % lay.tp == 0 or lay.tp % m.kv_heads == 0
    )
    context = s % (2 * lay.cp) == 0 if lay.cp > 1 else True
    context = context and s // lay.cp % lay.tp == 0
    if lay.cp > 1 and lay.cp_method == "ulysses":
        kv = max(1, m.kv_heads // lay.tp)
        context = context and m.heads // lay.tp % lay.cp == 0 and (kv % lay.cp == 0 or lay.cp % kv == 0)
    pipeline = (
        lay.pp * lay.vpp <= m.layers
        and (not lay.last_stage_less_layers or lay.pp * lay.vpp > 1)
        and (m.layers + lay.last_stage_less_layers) // (lay.pp * lay.vpp) > lay.last_stage_less_layers >= 0
        and {
            "1f1b": lay.vpp == 1,
            "zb_h1": lay.vpp == 1,
            "gpipe": lay.vpp == 1 or lay.pp > 1,
            "interleaved": lay.pp > 1 and lay.vpp > 1 and lay.gradient_accumulation_steps % lay.pp == 0,
        }[lay.schedule]
    )
    expert = lay.dp * lay.cp % lay.ep == 0 and lay.expert_tp in (1, lay.tp) and (lay.ep == 1 or m.moe is not None)
    if m.moe:
        expert = expert and m.moe.experts % lay.ep == 0 and m.moe.ffn_size % lay.expert_tp == 0
    places, group = lay.dp * lay.cp, lay.shard_group
    cut = 0 <= lay.zero <= 3 and (lay.zero == 3 or not (lay.reduce_scatter_once or lay.reshard_after_step))
    cut = cut and group >= 0 and (group == 0 or lay.zero > 0)
    cut = cut and (group == 0 or (places % group == 0 and 0 in (group % lay.ep, lay.ep % group)))
    batch = case.global_batch_size in (None, lay.global_batch_size)
    return tensor and context and pipeline and expert and cut and batch and case.world in (None, lay.world)


@settings(max_examples=300, deadline=None)
@given(CASES)
def test_a_case_is_legal_when_the_formula_says_so(case: Case) -> None:
    assert (breaches(case) == []) == legal(case)


@settings(max_examples=150, deadline=None)
@given(CASES, SETTLES)
def test_a_repair_repairs_and_changes_nothing_legal(case: Case, settle: Settle) -> None:
    case = settle(case.with_accumulation_steps())
    changes = repair(case, settle)
    if not breaches(case):
        assert changes == {}
        return
    for setting, value in changes.items():
        case = case.put(setting, value)
    assert breaches(settle(case)) == []
    assert not settle.open & changes.keys()


@pytest.mark.parametrize(
    ("layout", "setting", "found", "allowed", "fix"),
    [
        (Layout(tp=3), "tp", 3, (4, 2, 8), "--parallel.tp 4"),
        (Layout(tp=16), "tp", 16, (8, 4, 2), "--parallel.tp 8"),
        (Layout(pp=5), "pp", 5, (4, 3, 2), "--parallel.pp 4"),
        (Layout(cp=3), "cp", 3, (4, 2, 8), "--parallel.cp 4"),
        (Layout(ep=2), "ep", 2, (1,), "--parallel.ep 1"),
        (Layout(dp=2, zero=4), "zero", 4, (3, 2, 1), "--parallel.zero 3"),
        (Layout(dp=8, zero=2, shard_group=3), "shard_group", 3, (4, 2, 1), "--parallel.shard_group 4"),
        (Layout(dp=2, shard_group=2), "shard_group", 2, (0,), "--parallel.shard_group 0"),
        (
            Layout(dp=2, zero=2, reduce_scatter_once=True),
            "reduce_scatter_once", True, (False,), "--parallel.reduce_scatter_once False",
        ),
        (Layout(dp=2, zero=1, reshard_after_step=True), "reshard_after_step", True, (False,),
        "--parallel.reshard_after_step False"),
        (Layout(vpp=2), "vpp", 2, (1,), "--parallel.vpp 1"),
        (Layout(last_stage_less_layers=1), "last_stage_less_layers", 1, (0,), "--parallel.last_stage_less_layers 0"),
        (Layout(tp=2, expert_tp=4), "expert_tp", 4, (2, 1), "--parallel.expert_tp 2"),
        (Layout(cp=16, cp_method="ulysses"), "cp", 16, (8, 4, 2), "--parallel.cp 8"),
        (
            Layout(schedule="interleaved"),
            "schedule", "interleaved", ("1f1b", "gpipe", "zb_h1"), "--parallel.schedule 1f1b",
        ),
        (
            Layout(schedule="interleaved", pp=2, vpp=2, gradient_accumulation_steps=3),
            "gradient_accumulation_steps", 3, (4, 2, 6), "--batch.gradient_accumulation_steps 4",
        ),
    ],
)  # fmt: skip
def test_a_problem_names_the_nearest_values(
    layout: Layout, setting: str, found: object, allowed: tuple[object, ...], fix: str
) -> None:
    problem = problems(TINY, layout, 256)[0]
    assert (problem.setting, problem.found, problem.allowed, problem.fix) == (setting, found, allowed, fix)


def test_legal_layouts_of_real_models_stay_legal() -> None:
    model = preset("llama-3.1-8b").model
    check_legal(model, Layout(tp=8, pp=5, cp=2, dp=3), 8192)  # stages may be uneven
    check_legal(model, Layout(tp=32), 8192)  # KV heads shared by four tensor ranks each
    check_legal(preset("qwen3-30b-a3b").model, Layout(dp=16, cp=4, ep=64), 8192)
    check_legal(TINY_MOE, Layout(tp=2, dp=2, ep=2, expert_tp=2), 256)


def test_a_padded_vocabulary_is_the_smaller_change() -> None:
    model = ModelSpec(layers=1, hidden_size=8, heads=4, kv_heads=4, head_size=2, ffn_size=8, vocab_size=50_257)
    assert [p.fix for p in problems(model, Layout(tp=4), 16)] == ["--model.vocab_size 50260"]


def test_the_world_decides_dp() -> None:
    (problem,) = problems(TINY, Layout(tp=2, dp=3), 256, world=8)
    assert (problem.setting, problem.allowed, problem.fix) == ("dp", (4,), "--parallel.dp 4")


def test_all_problems_are_told_and_three_are_shown() -> None:
    with pytest.raises(BadLayout) as caught:
        check_legal(TINY, Layout(tp=3, cp=3, pp=9, ep=5), 256, origins={"parallel.tp": "run.toml:3"})
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error[LAYOUT]: ") for line in lines)
    assert "parallel.tp (run.toml:3)" in lines[0]
    assert {p.setting for p in caught.value.problems} == {"tp", "cp", "pp", "ep"}
    assert len(json.loads(json.dumps(caught.value.as_dict()))["problems"]) == len(caught.value.problems)


@pytest.mark.alone
@settings(max_examples=50, deadline=None)
@given(
    st.integers(2**40, 2**48), st.sampled_from(["tp", "pp", "cp", "ep", "vpp", "dp", "expert_tp", "micro_batch_size"])
)
@example(2**48, "cp")
def test_huge_degrees_are_refused_quickly(huge: int, axis: str) -> None:
    layout = Layout(**{axis: huge})
    started = time.process_time()
    assert problems(TINY_MOE, layout, 256, global_batch_size=16, world=8)[0].fix
    assert time.process_time() - started < 0.5
