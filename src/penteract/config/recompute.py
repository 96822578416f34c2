"""What people call a recomputation, as the ops that a layout recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penteract.units import Bytes

# "none" still gathers tokens again, which is so cheap in memory; full keeps a layer's input alone.
NONE: tuple[str, ...] = ("enter",)
WHOLE: Mapping[str, tuple[str, ...]] = {"none": NONE, "full": ("*",)}

# Names of the field for a few ops together (Megatron-LM's recompute_modules).
GROUPS: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("repeat_heads", "attention", "merge_attention"),
    "layernorm": ("rms_norm", "layer_norm"),
    "norms": ("rms_norm", "layer_norm"),
    "activation": ("swiglu", "gelu"),
    "mla_up_proj": ("unfold_heads",),
}


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What the cheapest recomputation must stay within, on the fullest rank: a `fraction` of the activations that the
    layout has without recomputation, or bytes in all, `allocated`. One of them is given."""

    fraction: float = 0.0
    allocated: Bytes = 0


def words_of(recompute: str | Iterable[str]) -> tuple[str, ...]:
    """The ops whose results are not kept: of "none", "full", or of ops and groups of them, each once."""
    if isinstance(recompute, str):
        recompute = WHOLE.get(recompute, (recompute,))
    return tuple(dict.fromkeys(op_name for name in recompute for op_name in GROUPS.get(name, (name,))))


def name_of(recompute: tuple[str, ...]) -> str | tuple[str, ...]:
    """As a run file says it: "none", "full", or ops."""
    return next((name for name, op_names in WHOLE.items() if op_names == recompute), recompute)
