"""RMSNorm or LayerNorm, as the model says."""

from __future__ import annotations

from penteract.config.model import ModelSpec
from penteract.ops.do import Do, Value
from penteract.ops.params import Param


def norm(do: Do, m: ModelSpec, name: str, x: Value) -> Value:
    """x [.., D] -> same"""
    w = Param(f"{name}.weight", (m.hidden_size,), fill=1.0, decay=False)
    if m.norm == "rms":
        return do.rms_norm(x, w, m.norm_epsilon)
    return do.layer_norm(x, w, Param(f"{name}.bias", (m.hidden_size,), decay=False), m.norm_epsilon)
