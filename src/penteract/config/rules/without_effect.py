"""Legal settings that change nothing beside others."""

from __future__ import annotations

from collections.abc import Iterable

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.rules.case import KEYS
from penteract.schedule.registry import schedule_of


def why_without_effect(setting: str, model: ModelSpec, layout: Layout) -> str:
    """Why a setting changes nothing, whatever its value; "" if it may."""
    match setting:
        case "ep" | "expert_tp" | "experts" | "expert_rows" | "ep_method" | "capacity_percent" if model.moe is None:
            return "this model has no experts"
        case "last_stage_less_layers" if layout.stages == 1:
            return "there is no pipeline"
        case "vpp" if schedule_of(layout.schedule).max_vpp == 1:
            return f"{layout.schedule} runs one chunk a rank"
        case "cp_method" if layout.cp == 1:
            return "the sequence is not split"
        case "ep_method" | "expert_rows" if layout.ep == 1:
            return "no ranks share experts"
        case "capacity_percent" if not layout.sends_blocks:
            return "no all-to-all sends blocks of padded rows"
        case "shard_group" if layout.zero == 0:
            return "ZeRO 0 shards nothing"
        case "reshard_after_step" | "reduce_scatter_once" if layout.zero < 3:
            return "of ZeRO 3 only"
        case "recompute_every" | "recompute_first" | "recompute_else" if layout.recompute == Layout().recompute:
            return "nothing is recomputed"
        case "offload_every" if not layout.offload:
            return "no activations are offloaded"
        case "loss_chunk" if layout.loss != "chunked":
            return "the loss is not chunked"
        case _:
            return ""


def notes_without_effect(given: Iterable[str], model: ModelSpec, layout: Layout) -> list[str]:
    """A line for each of these keys that is set to something and changes nothing."""
    wanted, plain = set(given), Layout()
    found = list[str]()
    for setting, key in KEYS.items():
        if key in wanted and hasattr(plain, setting) and getattr(layout, setting) != getattr(plain, setting):
            why = why_without_effect(setting, model, layout)
            found += [f"note: {key} changes nothing: {why}"] * bool(why)
    return found
