"""Presets: a model by name with settings that suit it. A preset is a starting point; any value can be overridden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from penteract.config import catalog
from penteract.config.files.keys import show_key
from penteract.config.model import LatentSpec, ModelSpec, MoESpec
from penteract.errors import BadInput

# Bytes 0..255 and 256, the end of a document; padded so that tensor ranks share the table evenly.
BYTE_VOCABULARY = 264

TINY = ModelSpec(
    name="tiny", layers=4, hidden_size=128, heads=8, kv_heads=4, head_size=16, ffn_size=384, vocab_size=BYTE_VOCABULARY,
    initial_std=0.04,
)  # fmt: skip
TINY_MOE = replace(
    TINY, name="tiny-moe", moe=MoESpec(experts=8, top_k=2, ffn_size=96, shared_ffn_size=96, every=2)
)  # fmt: skip
# DeepSeek-V3 in small: latent attention, a dense first layer, experts in groups, one token predicted ahead.
TINY_LATENT = replace(
    TINY, name="tiny-latent", kv_heads=8, head_size=24, mtp_layers=1,
    latent=LatentSpec(kv_rank=32, plain_size=16, rope_size=8, value_size=16, query_rank=48),
    moe=MoESpec(
        experts=8, top_k=2, ffn_size=96, shared_ffn_size=96, dense_layers=(0,), score="sigmoid", balance="bias",
        weight_scale=2.5, groups=4, top_groups=2, group_score="top2",
    ),
)  # fmt: skip

_LEARNER: Mapping[str, object] = {
    "batch.sequence_length": 256,
    "batch.global_batch_size": 16,
    "batch.micro_batch_size": 4,
    "optimizer.learning_rate": 1e-3,  # small: rounding errors stay small, and layouts agree over the whole run
    "learning_rate.warmup_steps": 10,
    "training.steps": 40,
    "training.validation_every": 40,
    "training.sample_tokens": 120,
}


def _published(entry: catalog.CatalogEntry) -> Mapping[str, object]:
    """Settings for a model of the catalogue."""
    return {
        "batch.sequence_length": min(entry.model.max_positions, 8192),
        "batch.global_batch_size": 64,
        "batch.micro_batch_size": 1,
        "optimizer.learning_rate": _learning_rate(entry),
        "learning_rate.warmup_steps": 100,
        "precision.dtype": "bf16",
    }


def _learning_rate(entry: catalog.CatalogEntry) -> float:
    return entry.learning_rate or _learning_rate_of_size(entry.parameters)


def _learning_rate_of_size(parameters: int) -> float:
    """A peak, where none was published: small models get a higher one."""
    return 4e-4 if parameters < 2e9 else 3e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """`settings` maps keys of a run file to values; its `batch.micro_batch_size` is an upper bound."""

    model: ModelSpec
    settings: Mapping[str, object] = field(default_factory=dict[str, object])


# Presets for learning and tests. `preset` also takes every published model.
PRESETS: Mapping[str, Preset] = {
    p.model.name: p
    for p in (
        Preset(model=TINY, settings=_LEARNER),
        Preset(model=TINY_MOE, settings=_LEARNER),
        Preset(model=TINY_LATENT, settings=_LEARNER),
    )
}


def preset(name: str, *, where: str = "--preset") -> Preset:
    """The preset called `name`, or the catalogue's model; raises BadInput with the nearest name if there is neither."""
    if name in PRESETS:
        return PRESETS[name]
    try:
        entry = catalog.entry(name)
    except BadInput:
        near = get_close_matches(name[:80].lower(), (*PRESETS, *catalog.names()), n=1, cutoff=0.4)
        fix = f"use {near[0]}" if near else "choose one of these, or a published model"
        raise BadInput(
            "PRESET", "no such preset", where=where, found=show_key(name), fix=fix,
            allowed=f"{', '.join(PRESETS)}, or a published model such as llama-3.1-8b",
        ) from None  # fmt: skip
    return Preset(model=entry.model, settings=_published(entry))


def usual_learning_rate(model: ModelSpec, parameters: int) -> float:
    """The peak of a model that is trained from its initial weights: that of the preset of its shape, whatever its name;
    of others, as of their size."""
    for chosen in PRESETS.values():
        if _has_shape(chosen.model, model):
            return float(str(chosen.settings["optimizer.learning_rate"]))
    published = (catalog.entry(name) for name in catalog.names())
    return next(
        (_learning_rate(e) for e in published if _has_shape(e.model, model)), _learning_rate_of_size(parameters)
    )


def _has_shape(preset_model: ModelSpec, model: ModelSpec) -> bool:
    return replace(preset_model, name=model.name) == model
