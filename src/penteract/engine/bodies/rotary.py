"""Rotary angles, with Llama 3.1's scaling of long wavelengths.   Su 2021 (2104.09864); Dubey 2024 (2407.21783) §3.2"""

from __future__ import annotations

import math

import torch

from penteract.ops.tape import Site
from penteract.spec.model import RopeScaling


def angles(site: Site, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [s, B] -> cos and sin, [s, B, 1, C/2]: feature i turns with theta^(-2i/C)."""
    half = int(site.attrs["head_size"]) // 2
    frequency = _frequencies(half, float(site.attrs["theta"]), site.attrs["scaling"], positions.device)
    angle = positions[..., None, None].to(torch.float64) * frequency
    cos = torch.empty(angle.shape, dtype=dtype, device=angle.device)
    torch.cos(angle, out=cos)
    return cos, angle.sin_().to(dtype)


def _frequencies(half: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> torch.Tensor:
    """Turns of each feature for one step of position, in radians: [half] of float64."""
    frequency = torch.pow(theta, torch.arange(half, dtype=torch.float64, device=device).div_(-half))
    return frequency if scaling is None else _scaled(frequency, scaling)


def _scaled(frequency: torch.Tensor, s: RopeScaling) -> torch.Tensor:
    """Wavelengths beyond original_positions / low are stretched by factor; those under original_positions / high are
    left alone; between the two, the stretch fades linearly in turns."""
    turns = frequency * (s.original_positions / (2 * math.pi))
    share = turns.sub_(s.low_frequency_factor).div_(s.high_frequency_factor - s.low_frequency_factor).clamp_(0, 1)
    return (frequency / s.factor).lerp_(frequency, share)
