"""Presets: a model by name with settings that suit it. A preset is a starting point; any value can be overridden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from penteract.errors import BadInput
from penteract.spec.catalog import models
from penteract.spec.model import ModelSpec, MoESpec

# Bytes 0..255 and 256, the end of a document; padded so that tensor ranks share the table evenly.
BYTE_VOCABULARY = 264

TINY = ModelSpec(
    name="tiny", layers=4, hidden_size=128, heads=8, kv_heads=4, head_size=16, ffn_size=384, vocab_size=BYTE_VOCABULARY,
    initial_std=0.04,
)  # fmt: skip
TINY_MOE = replace(
    TINY, name="tiny-moe", moe=MoESpec(experts=8, top_k=2, ffn_size=96, shared_ffn_size=96, every=2)
)  # fmt: skip

_LEARNER: Mapping[str, object] = {
    "batch.sequence_length": 256,
    "batch.global_batch_size": 16,
    "batch.micro_batch_size": 4,
    "optimizer.learning_rate": 1e-3,  # small enough that rounding stays rounding: layouts agree over the whole run
    "learning_rate.warmup_steps": 10,
    "training.steps": 40,
    "training.validation_every": 40,
    "training.sample_tokens": 120,
}


def _published(sequence_length: int, learning_rate: float) -> Mapping[str, object]:
    return {
        "batch.sequence_length": sequence_length,
        "batch.global_batch_size": 64,
        "batch.micro_batch_size": 1,
        "optimizer.learning_rate": learning_rate,
        "learning_rate.warmup_steps": 100,
        "precision.dtype": "bf16",
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """`settings` maps keys of a run file to values; its `batch.micro_batch_size` is an upper bound."""

    model: ModelSpec
    settings: Mapping[str, object] = field(default_factory=dict[str, object])


PRESETS: Mapping[str, Preset] = {
    p.model.name: p
    for p in (
        Preset(model=TINY, settings=_LEARNER),
        Preset(model=TINY_MOE, settings=_LEARNER),
        Preset(model=models.GPT2, settings=_published(1024, 6e-4)),
        Preset(model=models.LLAMA_3_2_1B, settings=_published(4096, 4e-4)),
        Preset(model=models.LLAMA_3_1_8B, settings=_published(8192, 3e-4)),
        Preset(model=models.QWEN3_0_6B, settings=_published(4096, 4e-4)),
        Preset(model=models.QWEN3_30B_A3B, settings=_published(4096, 3e-4)),
        Preset(model=models.MISTRAL_7B, settings=_published(8192, 3e-4)),
        Preset(model=models.MIXTRAL_8X7B, settings=_published(8192, 3e-4)),
    )
}


def preset(name: str, *, where: str = "--preset") -> Preset:
    """The preset called `name`; BadInput with the nearest names when there is none."""
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1, cutoff=0.4)
        fix = f"use {near[0]}" if near else "choose one of these"
        raise BadInput("PRESET", "no such preset", where=where, found=name, allowed=", ".join(PRESETS), fix=fix)
    return PRESETS[name]
