"""Rotary positions in a config.json: theta, and how wavelengths are stretched."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any, cast

from penteract.config.files.keys import show_key
from penteract.config.hf.fields import Fields
from penteract.config.model import RopeScaling
from penteract.errors import BadInput

# kind -> the fields that it has besides those of all
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "attention_factor", "truncate", "finetuned",
    ),
    "linear": ("factor",),
}  # fmt: skip
_OF_ALL = ("rope_theta", "partial_rotary_factor", "rope_type", "type")
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
    kind = inner.choice(name, "another rope scaling", tuple(_FIELDS), "default")
    _check_fields(inner, kind, named=name in inner)
    if kind == "default":
        return found
    if kind == "linear":
        scaling = RopeScaling(kind="linear", factor=inner.get("factor", f"{_PART}.factor"))
    else:
        positions = f.get("max_position_embeddings", "model.max_positions")
        scaling = _llama3(inner, positions) if kind == "llama3" else _yarn(inner, positions, scales_scores)
    return {**found, "rope_scaling": scaling}


def _check_fields(inner: Fields, kind: str, *, named: bool) -> None:
    """A field that this kind of scaling lacks would change the model in a way that is not known here."""
    supported = (*_OF_ALL, *_FIELDS[kind])
    for name in inner.config:
        if name in inner and name not in supported:
            fix = "" if named else f"name its rope_type, one of {', '.join(_FIELDS)}"
            raise BadInput("CONFIG", f"no field of rope scaling \"{kind}\"", where=inner.where, found=show_key(name),
                           allowed=", ".join(supported), fix=fix)  # fmt: skip


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
    factor = f.get("factor", f"{_PART}.factor")
    low = f.get("low_freq_factor", f"{_PART}.low_frequency_factor")
    high = f.get("high_freq_factor", f"{_PART}.high_frequency_factor")
    if high <= low:
        raise f.wrong("high_freq_factor", f"more than low_freq_factor = {low:g}")
    return RopeScaling(
        kind="llama3",
        factor=factor,
        low_frequency_factor=low,
        high_frequency_factor=high,
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
    fast = f.get("beta_fast", f"{_PART}.fast_rotations", 32.0)
    slow = f.get("beta_slow", f"{_PART}.slow_rotations", 1.0)
    if fast < slow:
        raise f.wrong("beta_fast", f"beta_slow = {slow:g} or more", found=f"{fast:g}")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_positions=original,
        fast_rotations=fast,
        slow_rotations=slow,
        attention_factor=f.get("attention_factor", f"{_PART}.attention_factor", halves),
        softmax_factor=_growth(factor, everywhere) ** 2 if scales_scores and everywhere else 1.0,
    )


def _growth(factor: float, scale: float) -> float:
    return 0.1 * scale * log(factor) + 1.0 if factor > 1 else 1.0
