"""Rotary angles, and three ways of stretching their wavelengths.

Su 2021 (2104.09864); Chen 2023 (2306.15595), linear; Peng 2023 (2309.00071), YaRN; Dubey 2024 (2407.21783) §3.2.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from penteract.config.model import RopeScaling
from penteract.ops.tape import Site


def angles(site: Site, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [s, B] -> cos and sin, [s, B, 1, C/2]: of C rotated features, pair i rotates by theta^(-2i/C) a
    token."""
    half = (int(site.attrs["head_size"]) - int(site.attrs["plain_size"])) // 2
    frequency = _frequencies(half, float(site.attrs["theta"]), site.attrs["scaling"], positions.device)
    angle = positions[..., None, None].to(torch.float64) * frequency
    cos = torch.empty(angle.shape, dtype=dtype, device=angle.device)
    torch.cos(angle, out=cos)
    angle.sin_()
    scaling: RopeScaling | None = site.attrs["scaling"]
    if scaling is not None and scaling.attention_factor != 1:
        cos.mul_(scaling.attention_factor)
        angle.mul_(scaling.attention_factor)
    return cos, angle.to(dtype)


def turns(site: Site, device: torch.device) -> torch.Tensor:
    """The same as shares of a whole turn for one step of position, [C/2] of float64: made once, and kept."""
    half = (int(site.attrs["head_size"]) - int(site.attrs["plain_size"])) // 2
    return _turns(half, float(site.attrs["theta"]), site.attrs["scaling"], device)


@cache
def _turns(half: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> torch.Tensor:
    return _frequencies(half, theta, scaling, device).div_(2 * math.pi)


def _frequencies(half: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> torch.Tensor:
    """The rotation of each pair of features for one step of position, in radians: [half] of float64."""
    frequency = torch.pow(theta, torch.arange(half, dtype=torch.float64, device=device).div_(-half))
    if scaling is None:
        return frequency
    match scaling.kind:
        case "linear":
            return frequency.div_(scaling.factor)
        case "llama3":
            return _by_wavelength(frequency, scaling)
        case "yarn":
            return _by_rotations(frequency, theta, scaling)


def _by_rotations(frequency: torch.Tensor, theta: float, s: RopeScaling) -> torch.Tensor:
    """YaRN §3.2: features that rotate at least `fast_rotations` times over the original positions stay; those that
    rotate at most `slow_rotations` times are stretched by `factor`; in between, the stretch grows linearly with the
    feature."""
    half = len(frequency)

    def feature(rotations: float) -> float:
        """The feature, as a real number, that rotates so often."""
        return half * math.log(s.original_positions / (2 * math.pi * rotations)) / math.log(theta)

    first = max(math.floor(feature(s.fast_rotations)), 0)
    last = min(math.ceil(feature(s.slow_rotations)), 2 * half - 1)
    width = last - first or 0.001
    share = torch.arange(half, dtype=frequency.dtype, device=frequency.device).sub_(first).div_(width).clamp_(0, 1)
    return frequency.lerp_(frequency / s.factor, share)


def _by_wavelength(frequency: torch.Tensor, s: RopeScaling) -> torch.Tensor:
    """Wavelengths above original_positions / low are stretched by `factor`; those below original_positions / high stay;
    in between, the stretch fades linearly with the number of rotations."""
    turns = frequency * (s.original_positions / (2 * math.pi))
    share = turns.sub_(s.low_frequency_factor).div_(s.high_frequency_factor - s.low_frequency_factor).clamp_(0, 1)
    return (frequency / s.factor).lerp_(frequency, share)
