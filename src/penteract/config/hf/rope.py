"""Rotary positions in a config.json: theta, and how wavelengths are stretched."""

from __future__ import annotations

from math import log
from typing import Any, cast

from penteract.config.hf.fields import Fields
from penteract.config.model import RopeScaling

_KINDS = ("default", "llama3", "yarn", "linear")
_PART = "model.rope_scaling"


def rope(f: Fields, *, theta: float = 10_000.0, scales_scores: bool = False) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a model.

    They are two top-level fields in older files, and one table, `rope_parameters`, in newer ones.
    `theta`: the family's, where the file is silent. `scales_scores`: of the family's yarn, `mscale_all_dim` scales
    attention's scores besides (DeepSeek).
    """
    inner = _table(f)
    for place in (f, inner):
        place.choice("partial_rotary_factor", "rotary positions on a part of each head", (1.0,), 1.0)
    found = {"rope_theta": (inner if "rope_theta" in inner else f).get("rope_theta", "model.rope_theta", theta)}
    name = "rope_type" if "rope_type" in inner else "type"
    kind = inner.choice(name, "another rope scaling", _KINDS, "default")
    if kind == "default":
        return found
    if kind == "linear":
        scaling = RopeScaling(kind="linear", factor=inner.get("factor", f"{_PART}.factor"))
    else:
        positions = f.get("max_position_embeddings", "model.max_positions")
        scaling = _llama3(inner, positions) if kind == "llama3" else _yarn(inner, positions, scales_scores)
    return {**found, "rope_scaling": scaling}


def _table(f: Fields) -> Fields:
    name = "rope_parameters" if "rope_parameters" in f else "rope_scaling"
    table = f.config.get(name)
    if table is not None and not isinstance(table, dict):
        raise f.wrong(name, "{…}")
    found = cast("dict[str, Any]", table or {})
    if any(isinstance(value, dict) for value in found.values()) and "rope_type" not in found and "type" not in found:
        raise f.unsupported(name, "rotary positions that differ from layer to layer", "one table")
    return Fields(found, f"{f.where}: {name}")


def _llama3(f: Fields, positions: int) -> RopeScaling:
    return RopeScaling(
        kind="llama3",
        factor=f.get("factor", f"{_PART}.factor"),
        low_frequency_factor=f.get("low_freq_factor", f"{_PART}.low_frequency_factor"),
        high_frequency_factor=f.get("high_freq_factor", f"{_PART}.high_frequency_factor"),
        original_positions=f.get("original_max_position_embeddings", f"{_PART}.original_positions", positions),
    )


def _yarn(f: Fields, positions: int, scales_scores: bool) -> RopeScaling:
    """YaRN (2309.00071 §3.4). Cosines and sines grow by `attention_factor`, 0.1·ln(factor) + 1 by default.

    Files with `mscale` say it in two halves: what cosines and sines get, and what all dims get, of which the former
    are relieved.
    """
    f.choice("truncate", "a band of wavelengths between whole dims", (True,), True)
    original = f.get("original_max_position_embeddings", f"{_PART}.original_positions", positions)
    implied = {} if original > positions else {"default": positions / original}
    factor = f.get("factor", f"{_PART}.factor", **implied)
    rotated, everywhere = f.real("mscale", 0, 100), f.real("mscale_all_dim", 0, 100)
    halves = _growth(factor, rotated) / _growth(factor, everywhere) if rotated and everywhere else _growth(factor, 1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_positions=original,
        fast_rotations=f.get("beta_fast", f"{_PART}.fast_rotations", 32.0),
        slow_rotations=f.get("beta_slow", f"{_PART}.slow_rotations", 1.0),
        attention_factor=f.get("attention_factor", f"{_PART}.attention_factor", halves),
        softmax_factor=_growth(factor, everywhere) ** 2 if scales_scores and everywhere else 1.0,
    )


def _growth(factor: float, scale: float) -> float:
    return 0.1 * scale * log(factor) + 1.0 if factor > 1 else 1.0
