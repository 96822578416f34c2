"""What people call a recomputation, as the words that a layout recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penteract.units import Bytes

# "none" still gathers tokens again, which is so cheap in memory; full keeps a layer's input alone.
NONE: tuple[str, ...] = ("enter",)
WHOLE: Mapping[str, tuple[str, ...]] = {"none": NONE, "full": ("*",)}

# Names of the field for a few words together (Megatron-LM's recompute_modules).
GROUPS: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("repeat_heads", "attention", "merge_attention"),
    "layernorm": ("rms_norm", "layer_norm"),
    "norms": ("rms_norm", "layer_norm"),
    "activation": ("swiglu", "gelu"),
    "mla_up_proj": ("unfold_heads",),
}


@dataclass(frozen=True, slots=True)
class Budget:
    """What the cheapest recomputation must stay within, on the fullest rank: a `fraction` of the activations that the
    layout has without recomputation, or bytes in all, `allocated`. One of them is given."""

    fraction: float = 0.0
    allocated: Bytes = 0


def words_of(recompute: str | Iterable[str]) -> tuple[str, ...]:
    """The words whose results are not kept: of "none", "full", or of words and groups of them, each once."""
    if isinstance(recompute, str):
        recompute = WHOLE.get(recompute, (recompute,))
    return tuple(dict.fromkeys(word for name in recompute for word in GROUPS.get(name, (name,))))


def name_of(recompute: tuple[str, ...]) -> str | tuple[str, ...]:
    """As a run file says it: "none", "full", or words."""
    return next((name for name, words in WHOLE.items() if words == recompute), recompute)
