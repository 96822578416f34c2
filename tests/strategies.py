"""Legal cases, drawn so that each is small, quick, and shrinks to one rank of a plain model."""

from __future__ import annotations

from itertools import product
from math import lcm
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from layouts import Case
from penteract.schedule.generate import ScheduleName
from penteract.spec import case as spec_case
from penteract.spec.layout import CONTEXT_METHODS, ContextMethod, Layout
from penteract.spec.model import ModelSpec, MoESpec
from penteract.spec.rules import breaches

WORLDS = (1, 2, 4, 8, 3, 6, 8, 4)  # those of the most layouts are drawn more often
DEGREES = (1, 2, 3, 4, 6, 8)
LARGEST_STAGE_COUNT = 8
REMAKES: tuple[tuple[str, ...], ...] = (
    ("enter",),
    (),
    ("*",),
    ("rms_norm", "swiglu"),
    ("enter", "gather"),
    ("ring",),
    ("to_heads", "repeat_heads", "attention"),
    ("enter", "linear", "rope"),
    ("send", "dispatch", "expert_linear"),
    ("layer_norm", "gelu", "leave"),
    ("router", "sort_by_expert", "combine"),
)
BUCKETS = (25 * 2**20, 2**16, 2**12, 0)  # bytes: all in one, several, and one for each parameter


def meshes(world: int) -> list[tuple[int, int, int, int]]:
    """Every (dp, tp, pp, cp) of `world` ranks."""
    return [(dp, tp, pp, cp) for dp, tp, pp, cp in product(DEGREES, repeat=4) if dp * tp * pp * cp == world]


def legal(case: Case) -> bool:
    """By the rules alone: a refusal's search for the nearest legal layout takes its time."""
    asked = spec_case.Case(model=case.model, layout=case.layout, sequence_length=case.sequence_length)
    return not breaches(asked)


@st.composite
def cases(draw: DrawFn, max_ranks: int = 8) -> Case:
    """A legal case on at most `max_ranks` ranks: nearly every draw is legal as it is made."""
    world = draw(st.sampled_from([n for n in WORLDS if n <= max_ranks]))
    dp, tp, pp, cp = draw(st.sampled_from(meshes(world)))
    schedule, vpp, steps = draw(schedules(pp))
    method: ContextMethod = draw(st.sampled_from(CONTEXT_METHODS)) if cp > 1 else "gather"
    experts = draw(st.booleans())
    ep = draw(st.sampled_from([n for n in DEGREES if (dp * cp) % n == 0])) if experts else 1
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, vpp=vpp,
        expert_tp=draw(st.sampled_from([1, tp])) if experts and tp > 1 else 1,
        schedule="1f1b" if schedule == "woven" else schedule,
        context_method=method,
        micro_batch_size=draw(st.integers(1, 2)),
        gradient_accumulation_steps=steps,
        remake=draw(st.sampled_from(REMAKES)),
        bucket_bytes=draw(st.sampled_from(BUCKETS)),
    )  # fmt: skip
    tokens = 2 * cp * tp
    length = tokens * draw(st.integers(-(-12 // tokens), max(1, 24 // tokens)))
    case = Case(
        model=draw(models(layout, experts, length)),
        layout=layout,
        sequence_length=length,
        schedule="woven" if schedule == "woven" else None,
    )
    assert legal(case), case
    return case


@st.composite
def schedules(draw: DrawFn, pp: int) -> tuple[ScheduleName, int, int]:
    """-> schedule, vpp, gradient_accumulation_steps"""
    deep = 2 * pp <= LARGEST_STAGE_COUNT and pp > 1
    names: list[ScheduleName] = ["1f1b", "afab", "zb_h1", *(["interleaved"] if deep else [])]
    if pp == 1:
        names.append("woven")
    name = draw(st.sampled_from(names))
    if name == "interleaved":
        vpp = draw(st.integers(2, max(2, LARGEST_STAGE_COUNT // pp // 2)))
        return name, vpp, pp * draw(st.integers(1, 2 if pp < 4 else 1))
    vpp = draw(st.integers(1, 2)) if name == "afab" and deep else 1
    return name, vpp, draw(st.integers(1, 3 if pp == 1 else min(pp + 1, 5)))


@st.composite
def models(draw: DrawFn, layout: Layout, experts: bool, length: int) -> ModelSpec:
    """A tiny decoder that the layout's degrees cut evenly."""
    of_three = layout.tp * layout.cp % 3 == 0
    heads, size = (6, 48) if of_three else (8, 64)
    said: dict[str, Any] = {
        "layers": layout.stages + draw(st.integers(0, 1 if layout.stages > 1 else 2)),
        "hidden_size": draw(st.sampled_from([32, 24])),
        "heads": heads,
        "kv_heads": draw(kv_heads(layout, heads)),
        "head_size": 4,
        "ffn_size": size,
        "vocab_size": size,
        "initial_std": 0.3,
        "moe": draw(mixtures(layout)) if experts else None,
    }
    for name in ("qk_norm", "qkv_bias", "output_bias", "mlp_bias", "tied"):
        said[name] = draw(st.booleans())
    if draw(st.booleans()):
        said["norm"] = "layer"
    if draw(st.booleans()):
        said["activation"] = "gelu"
    if draw(st.booleans()):
        said |= {"positions": "learned", "max_positions": length + draw(st.sampled_from([0, 8]))}
    if draw(st.booleans()):
        said["sliding_window"] = draw(st.integers(1, 9))
    return ModelSpec(**said)


def kv_heads(layout: Layout, heads: int) -> SearchStrategy[int]:
    """Those that tp, and an exchange over cp, can deal: more, as many, or fewer than there are ranks."""
    cp = layout.cp if layout.context_method == "exchange" else 1
    fit: list[int] = []
    for n in range(1, heads + 1):
        local = max(1, n // layout.tp)
        even = heads % n == 0 and (n % layout.tp == 0 or layout.tp % n == 0)
        if even and (local % cp == 0 or cp % local == 0):
            fit.append(n)
    return st.sampled_from(fit)


@st.composite
def mixtures(draw: DrawFn, layout: Layout) -> MoESpec:
    """Experts in multiples of ep; four at least, so that one may stay without tokens."""
    smallest = lcm(layout.ep, 4 if layout.ep % 3 else 6)
    balance = draw(st.sampled_from(["loss", "bias", "none"]))
    return MoESpec(
        experts=smallest,
        top_k=draw(st.integers(1, 3)),
        ffn_size=2 * layout.tp if draw(st.booleans()) else 24,
        shared_ffn_size=draw(st.sampled_from([0, 24])),
        every=draw(st.integers(1, 2)),
        dense_layers=draw(st.sampled_from([(), (0,)])),
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalize_weights=draw(st.booleans()),
        balance=balance,
    )
