"""Sizes of the smallest decoder that every axis up to eight can cut."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "layers": 2, "hidden_size": 32, "heads": 8, "kv_heads": 2, "head_size": 4, "ffn_size": 64, "vocab_size": 64,
    "initial_std": 0.3,  # large, so that no gradient is near zero and attention is far from even
}  # fmt: skip
