"""The input of the legality rules, as one value whose settings can be read and replaced by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from penteract.config.files.sections import Kernels, MemorySection, Parallel
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec

_OF_LAYOUT = frozenset(f.name for f in fields(Layout))


def _keys(section: str, kind: type) -> dict[str, str]:
    """The fields of a section that are fields of a layout."""
    return {f.name: f"{section}.{f.name}" for f in fields(kind) if f.name in _OF_LAYOUT}


# setting -> the key of a run file that sets it
KEYS: Mapping[str, str] = {
    **_keys("parallel", Parallel),
    **{name: f"batch.{name}" for name in ("micro_batch_size", "global_batch_size", "sequence_length",
                                          "gradient_accumulation_steps")},
    **_keys("memory", MemorySection),
    **_keys("kernels", Kernels),
    "kv_heads": "model.kv_heads",
    "head_size": "model.head_size",
    "vocab_size": "model.vocab_size",
    "qk_norm": "model.qk_norm",
    "rope_size": "model.latent.rope_size",
    **{name: f"model.rope_scaling.{name}" for name in ("high_frequency_factor", "fast_rotations")},
    **{name: f"model.moe.{name}" for name in ("top_k", "groups", "top_groups")},
}  # fmt: skip

_OF_MODEL = frozenset(f.name for f in fields(ModelSpec))
OF_A_PART = {setting: key.split(".")[1] for setting, key in KEYS.items() if key.count(".") == 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, a layout and a batch. `global_batch_size` (sequences) and `world` are None if nothing fixes them."""

    model: ModelSpec
    layout: Layout
    sequence_length: int
    global_batch_size: int | None = None
    world: int | None = None

    def get(self, setting: str) -> Any:
        """The value of a setting of `KEYS`: a field of the layout, of the model or a part of it, or of the case
        itself."""
        if setting in _OF_LAYOUT:
            return getattr(self.layout, setting)
        if setting in _OF_MODEL:
            return getattr(self.model, setting)
        return getattr(self.part(setting) if setting in OF_A_PART else self, setting)

    def part(self, setting: str) -> Any:
        """The part of the model that has `setting`, as `model.moe` has `top_k`; None if the model lacks this part."""
        return getattr(self.model, OF_A_PART[setting])

    def put(self, setting: str, value: Any) -> Case:
        """A copy with another value of `setting`. A change of the layout or the batch also updates the accumulation
        steps."""
        if setting in _OF_LAYOUT:
            return replace(self, layout=replace(self.layout, **{setting: value})).with_accumulation_steps()
        if setting in _OF_MODEL:
            return replace(self, model=replace(self.model, **{setting: value}))
        if setting in OF_A_PART:
            changed = replace(self.part(setting), **{setting: value})
            return replace(self, model=replace(self.model, **{OF_A_PART[setting]: changed}))
        return replace(self, **{setting: value}).with_accumulation_steps()

    def with_accumulation_steps(self) -> Case:
        """The same with the accumulation steps that follow from the global batch (rounded down)."""
        per_step = self.layout.dp * self.layout.micro_batch_size
        if self.global_batch_size is None or per_step < 1:
            return self
        steps = max(1, self.global_batch_size // per_step)
        return replace(self, layout=replace(self.layout, gradient_accumulation_steps=steps))
