"""Legal cases, drawn so that each is small, quick, and shrinks to one rank of a plain model."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import lcm
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from layouts import Case
from penteract.config.layout import (
    COLLECTIVES,
    CP_METHODS,
    ELEMENTWISE,
    EP_METHODS,
    EVERY_FUSION,
    EXPERT_ROWS,
    FUSIONS,
    LOSS_KERNELS,
    ZERO_STAGES,
    CpMethod,
    Elementwise,
    ExpertRows,
    Fusion,
    Layout,
)
from penteract.config.model import LatentSpec, ModelSpec, MoESpec, RopeScaling
from penteract.config.precision.fp8 import Fp8
from penteract.config.precision.policy import RECIPES, Policy
from penteract.config.rules import case as spec_case
from penteract.config.rules.breaches import breaches
from penteract.schedule.registry import ScheduleName

WORLDS = (1, 2, 4, 8, 3, 6, 8, 4)  # those of the most layouts are drawn more often
DEGREES = (1, 2, 3, 4, 6, 8)
LARGEST_STAGE_COUNT = 8
RECOMPUTES: tuple[tuple[str, ...], ...] = (
    ("tp_all_gather",),
    (),
    ("*",),
    ("rms_norm", "swiglu"),
    ("tp_all_gather", "cp_all_gather"),
    ("ring",),
    ("to_heads", "repeat_heads", "attention"),
    ("tp_all_gather", "linear", "rope"),
    ("dispatch", "permute", "expert_linear"),
    ("layer_norm", "gelu", "tp_reduce_scatter"),
    ("router", "expert_permutation", "unpermute"),
    ("ep_all_gather", "permute"),
    ("ep_reduce_scatter", "tp_all_gather"),
    ("ep_all_gather", "router"),
    ("tp_all_gather", "cp_all_gather", "split", "unfold_heads"),
)
OFFLOADS: tuple[tuple[str, ...], ...] = (
    ("layer_inputs",),
    ("*",),
    ("attention", "swiglu", "linear"),
    ("layer_inputs", "tp_all_gather", "cp_all_gather", "rms_norm"),
    ("rope", "router", "permute", "split", "to_heads"),
)
SCALINGS = (
    RopeScaling(factor=8.0, original_positions=32),
    RopeScaling(kind="yarn", factor=40.0, original_positions=200, attention_factor=1.3, softmax_factor=0.7),
    RopeScaling(kind="linear", factor=4.0),
)
FUSES: tuple[tuple[Fusion, ...], ...] = (
    FUSIONS, (), ("norm",), ("add",), ("mlp", "qkv"), ("norm", "add"), EVERY_FUSION
)  # fmt: skip
BUCKETS = (25 * 2**20, 2**16, 2**12, 0)  # bytes: all in one, several, and one for each parameter


def meshes(world: int) -> list[tuple[int, int, int, int]]:
    """Every (dp, tp, pp, cp) of `world` ranks."""
    return [(dp, tp, pp, cp) for dp, tp, pp, cp in product(DEGREES, repeat=4) if dp * tp * pp * cp == world]


def legal(case: Case) -> bool:
    """By the rules alone: a refusal's search for the nearest legal layout takes its time."""
    asked = spec_case.Case(model=case.model, layout=case.layout, sequence_length=case.sequence_length)
    return not breaches(asked)


@st.composite
def cases(draw: DrawFn, max_ranks: int = 8, *, deepseek: bool = False) -> Case:
    """A legal case on at most `max_ranks` ranks: nearly every draw is legal as it is made."""
    world = draw(st.sampled_from([n for n in WORLDS if n <= max_ranks]))
    dp, tp, pp, cp = draw(st.sampled_from(meshes(world)))
    schedule, vpp, steps = draw(schedules(pp))
    method: CpMethod = draw(st.sampled_from(CP_METHODS)) if cp > 1 else "all_gather"
    experts = deepseek or draw(st.booleans())
    ep = draw(st.sampled_from([n for n in DEGREES if (dp * cp) % n == 0])) if experts else 1
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, vpp=vpp, last_stage_less_layers=draw(less_layers(pp * vpp)),
        expert_tp=draw(st.sampled_from([1, tp])) if experts and tp > 1 else 1,
        schedule="1f1b" if schedule == "overlapped" else schedule,
        cp_method=method,
        ep_method=draw(st.sampled_from(EP_METHODS)) if ep > 1 else "all_to_all",
        micro_batch_size=draw(st.integers(1, 2)),
        gradient_accumulation_steps=steps,
        **draw(recomputes()),
        bucket_bytes=draw(st.sampled_from(BUCKETS)),
        **draw(shards(dp * cp, ep)),
        loss=draw(st.sampled_from(LOSS_KERNELS)),
        loss_chunk=draw(st.sampled_from([0, 5, 2, 16])),
        fuse=draw(st.sampled_from(FUSES)), collectives=draw(st.sampled_from(COLLECTIVES)),
    )  # fmt: skip
    tokens = 2 * cp * tp
    length = tokens * draw(st.integers(-(-12 // tokens), max(1, 24 // tokens)))
    case = Case(
        model=draw(deepseeks(layout) if deepseek else models(layout, experts, length)),
        layout=layout,
        sequence_length=length,
        schedule="overlapped" if schedule == "overlapped" else None,
    )
    if experts and draw(st.booleans()):
        rows: ExpertRows = draw(st.sampled_from(EXPERT_ROWS)) if ep > 1 else "exact"
        room = {"expert_rows": rows, "capacity_percent": 100 * ep}  # of a block: all copies that there are
        grouped = replace(case, layout=replace(layout, experts="grouped", **room))
        case = grouped if legal(grouped) else case
    assert legal(case), case
    return case


@st.composite
def fp8_gather_cases(draw: DrawFn) -> Case:
    """Under ZeRO 3 with weights that are gathered in FP8: sizes are multiples of sixteen on every rank."""
    dp, tp, pp, cp = draw(st.sampled_from([m for n in (2, 4, 8) for m in meshes(n) if m[0] * m[3] > 1 and m[1] < 4]))
    experts = draw(st.booleans())
    ep = draw(st.sampled_from([n for n in (1, 2) if dp * cp % n == 0])) if experts else 1
    schedule, vpp, steps = draw(schedules(pp))
    cut = draw(shards(dp * cp, ep).filter(lambda cut: cut["shard_group"] != 1))
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, vpp=vpp, schedule="1f1b" if schedule == "overlapped" else schedule,
        gradient_accumulation_steps=steps, bucket_bytes=draw(st.sampled_from(BUCKETS)), **draw(recomputes()),
        **cut | {"zero": 3},
    )  # fmt: skip
    said: dict[str, Any] = {"mtp_layers": draw(st.integers(0, 1)), "tied": draw(st.booleans())}
    if experts:
        said["moe"] = MoESpec(experts=4, top_k=2, ffn_size=32, shared_ffn_size=draw(st.sampled_from([0, 32])))
    if draw(st.booleans()):
        said["latent"] = LatentSpec(kv_rank=16, plain_size=16, rope_size=16, value_size=16)
    model = ModelSpec(
        layers=layout.stages + draw(st.integers(1, 2)), hidden_size=32, heads=2, kv_heads=2, head_size=32,
        ffn_size=64, vocab_size=64, qkv_bias=draw(st.booleans()), **said,
    )  # fmt: skip
    fp8 = Fp8(kind="tensorwise", gather=True, first=draw(st.integers(0, 1)), powers=draw(st.booleans()))
    policy = replace(RECIPES[draw(st.sampled_from(["bf16", "fp64"]))], fp8=fp8)
    case = Case(model=model, layout=layout, sequence_length=128, precision=policy)
    assert legal(case), case
    return case


FUSES_WITH_FP8: tuple[tuple[Fusion, ...], ...] = (FUSIONS, ("fp8",), ("mlp", "fp8"), ("norm", "mlp", "qkv", "fp8"))


@st.composite
def cast_once_cases(draw: DrawFn) -> Case:
    """Linear layers in FP8 whose operands are cast once."""
    case = draw(fp8_gather_cases())
    assert isinstance(case.precision, Policy) and case.precision.fp8 is not None
    again = draw(st.sampled_from([(), ("quantise",)]))
    layout = replace(case.layout, fuse=draw(st.sampled_from(FUSES_WITH_FP8)), elementwise=draw(_ELEMENTWISE))
    layout = replace(layout, recompute=tuple(dict.fromkeys((*layout.recompute, *again))))
    policy = replace(case.precision, fp8=replace(case.precision.fp8, gather=False))
    if policy.stat != "fp32":
        layout = replace(layout, elementwise="reference")
    case = replace(case, layout=layout, precision=policy)
    assert legal(case), case
    return case


_ELEMENTWISE: SearchStrategy[Elementwise] = st.sampled_from(ELEMENTWISE)


@st.composite
def shards(draw: DrawFn, rows: int, ep: int) -> dict[str, Any]:
    """What ZeRO cuts over `rows` = dp·cp places, and over how many of them."""
    zero = draw(st.sampled_from(ZERO_STAGES))
    groups = [n for n in range(1, rows + 1) if rows % n == 0 and (n % ep == 0 or ep % n == 0)]
    return {
        "zero": zero,
        "shard_group": draw(st.sampled_from([0, *groups])) if zero else 0,
        "reduce_scatter_once": zero == 3 and draw(st.booleans()),
        "reshard_after_step": zero == 3 and draw(st.booleans()),
    }


@st.composite
def recomputes(draw: DrawFn) -> dict[str, Any]:
    """What is recomputed, in all layers or in some of them, and what is kept on the host."""
    said: dict[str, Any] = {"recompute": draw(st.sampled_from(RECOMPUTES)), "offload_optimizer": draw(st.booleans())}
    if draw(st.booleans()):
        said["recompute_else"] = draw(st.sampled_from(RECOMPUTES))
        said["recompute_every"], said["recompute_first"] = draw(
            st.sampled_from([(2, 0), (1, 1), (1, 2), (3, 0), (2, 3)])
        )
    if draw(st.booleans()):
        said["offload"], said["offload_every"] = draw(st.sampled_from(OFFLOADS)), draw(st.sampled_from([1, 1, 2, 3]))
    return said


@st.composite
def schedules(draw: DrawFn, pp: int) -> tuple[ScheduleName, int, int]:
    """-> schedule, vpp, gradient_accumulation_steps"""
    deep = 2 * pp <= LARGEST_STAGE_COUNT and pp > 1
    names: list[ScheduleName] = ["1f1b", "gpipe", "zb_h1", *(["interleaved"] if deep else [])]
    if pp == 1:
        names.append("overlapped")
    name = draw(st.sampled_from(names))
    if name == "interleaved":
        vpp = draw(st.integers(2, max(2, LARGEST_STAGE_COUNT // pp // 2)))
        return name, vpp, pp * draw(st.integers(1, 2 if pp < 4 else 1))
    vpp = draw(st.integers(1, 2)) if name == "gpipe" and deep else 1
    return name, vpp, draw(st.integers(1, 3 if pp == 1 else min(pp + 1, 5)))


def less_layers(stages: int) -> SearchStrategy[int]:
    """Of the last stage. With few stages, so that models stay small."""
    return st.sampled_from([0, 0, 1]) if 1 < stages < 4 else st.just(0)


@st.composite
def models(draw: DrawFn, layout: Layout, experts: bool, length: int) -> ModelSpec:
    """A tiny decoder that the layout's degrees cut evenly."""
    of_three = layout.tp * layout.cp % 3 == 0
    heads, size = (6, 48) if of_three else (8, 64)
    said: dict[str, Any] = {
        "layers": layout.stages * (1 + layout.last_stage_less_layers)
        - layout.last_stage_less_layers
        + draw(st.integers(0, 1 if layout.stages > 1 else 2)),
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
    if draw(st.booleans()):
        said |= draw(latents(heads))
    if draw(st.booleans()):
        said["rope_scaling"] = draw(st.sampled_from(SCALINGS))
    if draw(st.booleans()):
        said |= {"mtp_layers": draw(st.integers(1, 2)), "mtp_loss_coefficient": 0.7}
    if draw(st.booleans()):
        said["z_loss_coefficient"] = 0.05
    return ModelSpec(**said)


@st.composite
def deepseeks(draw: DrawFn, layout: Layout) -> ModelSpec:
    """DeepSeek-V3 as small as a layout lets it be: all that is new in it at once."""
    heads = 6 if layout.tp * layout.cp % 3 == 0 else 8
    moe = MoESpec(
        experts=lcm(layout.ep, 8 if layout.ep % 3 else 12), top_k=3, ffn_size=2 * layout.tp, shared_ffn_size=24,
        dense_layers=(0,), score="sigmoid", balance=draw(st.sampled_from(["bias", "loss"])), groups=4, top_groups=2,
        group_score="top2", weight_scale=2.5,
    )  # fmt: skip
    return ModelSpec(
        layers=max(2, layout.stages), hidden_size=24, heads=heads, ffn_size=8 * heads, vocab_size=8 * heads,
        initial_std=0.3, moe=moe, rope_scaling=SCALINGS[1], mtp_layers=draw(st.integers(1, 2)),
        mtp_loss_coefficient=0.7, **draw(latents(heads)),
    )  # fmt: skip


@st.composite
def latents(draw: DrawFn, heads: int) -> dict[str, Any]:
    """Keys and values of a latent, with values narrower or wider than keys."""
    latent = LatentSpec(
        kv_rank=draw(st.sampled_from([6, 9])),
        plain_size=draw(st.sampled_from([3, 4])),
        rope_size=draw(st.sampled_from([2, 4])),
        value_size=draw(st.sampled_from([3, 5, 8])),
        query_rank=draw(st.sampled_from([0, 7])),
    )
    head_size = latent.plain_size + latent.rope_size
    return {"latent": latent, "head_size": head_size, "kv_heads": heads, "qk_norm": False}


def kv_heads(layout: Layout, heads: int) -> SearchStrategy[int]:
    """Those that tp, and Ulysses, can divide: more, as many, or fewer than there are ranks."""
    cp = layout.cp if layout.cp_method == "ulysses" else 1
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
    experts = lcm(layout.ep, 4 if layout.ep % 3 else 6)
    balance = draw(st.sampled_from(["loss", "bias", "none"]))
    top_k, grouped = draw(st.integers(1, 3)), dict[str, Any]()
    if draw(st.booleans()):
        experts *= 2
        groups = draw(st.sampled_from([n for n in (2, 3, 4) if experts % n == 0]))
        fewest = top_k * groups // experts + 1  # one expert more than are chosen
        grouped = {
            "groups": groups,
            "top_groups": draw(st.integers(fewest, groups)),
            "group_score": draw(st.sampled_from(["max", "top2"])),
            "weight_scale": draw(st.sampled_from([1.0, 2.5])),
        }
    return MoESpec(
        experts=experts,
        top_k=top_k,
        ffn_size=2 * layout.tp if draw(st.booleans()) else 24,
        shared_ffn_size=draw(st.sampled_from([0, 24])),
        every=draw(st.integers(1, 2)),
        dense_layers=draw(st.sampled_from([(), (0,)])),
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalize_weights=draw(st.booleans()),
        balance=balance,
        **grouped,
    )
