"""Names of recomputations ("none", "full", groups of ops) -> the ops that a layout recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penteract.units import Bytes

# "none" still repeats the all-gather of tokens, which saves much memory; "full" keeps only a layer's input.
NONE: tuple[str, ...] = ("tp_all_gather",)
WHOLE: Mapping[str, tuple[str, ...]] = {"none": NONE, "full": ("*",)}

# Common names for groups of ops (Megatron-LM's recompute_modules).
GROUPS: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("repeat_heads", "attention", "ring"),
    "layernorm": ("rms_norm", "layer_norm"),
    "norms": ("rms_norm", "layer_norm"),
    "activation": ("swiglu", "gelu"),
    "mla_up_proj": ("unfold_heads",),
}


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The bound for the cheapest recomputation, on the rank with the most memory: a `fraction` of the activations
    without recomputation, or `allocated` bytes in all. One of them is given."""

    fraction: float = 0.0
    allocated: Bytes = 0


def ops_of(recompute: str | Iterable[str]) -> tuple[str, ...]:
    """ "none", "full", or ops and groups -> the ops whose results are not kept, each once."""
    if isinstance(recompute, str):
        recompute = WHOLE.get(recompute, (recompute,))
    return tuple(dict.fromkeys(op_name for name in recompute for op_name in GROUPS.get(name, (name,))))


def name_of(recompute: tuple[str, ...]) -> str | tuple[str, ...]:
    """The name in a run file: "none", "full", or the ops."""
    return next((name for name, op_names in WHOLE.items() if op_names == recompute), recompute)
