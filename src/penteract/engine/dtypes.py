"""The torch dtypes that a policy names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from penteract.config.precision.policy import Policy, Role, policy

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
        "int8": torch.uint8, "int32": torch.int32, "int64": torch.int64,
    }
)  # fmt: skip

FORMATS: Mapping[str, torch.dtype] = MappingProxyType({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2})


def dtype_of(role: Role, precision: str | Policy) -> torch.dtype:
    """The torch dtype of a role."""
    return DTYPES[policy(precision).dtype(role)]
