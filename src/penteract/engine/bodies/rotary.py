"""Rotary angles, with Llama 3.1's scaling of long wavelengths.   Su 2021 (2104.09864); Dubey 2024 (2407.21783) §3.2"""

from __future__ import annotations

import math

import torch

from penteract.ops.tape import Site
from penteract.spec.model import RopeScaling


def angles(site: Site, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [s, B] -> cos and sin, [s, B, 1, C/2]: feature i turns with theta^(-2i/C)."""
    half = int(site.attrs["head_size"]) // 2
    power = torch.arange(half, dtype=torch.float64, device=positions.device).div_(-half)
    frequency = torch.pow(float(site.attrs["theta"]), power)
    if (scaling := site.attrs["scaling"]) is not None:
        frequency = _scaled(frequency, scaling)
    angle = positions[..., None, None].to(torch.float64) * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _scaled(frequency: torch.Tensor, s: RopeScaling) -> torch.Tensor:
    """Wavelengths beyond original_positions / low are stretched by factor; those under original_positions / high are
    left alone; between the two, the stretch fades linearly in turns."""
    turns = frequency * s.original_positions / (2 * math.pi)
    share = ((turns - s.low_frequency_factor) / (s.high_frequency_factor - s.low_frequency_factor)).clamp(0, 1)
    return frequency * share + frequency / s.factor * (1 - share)
