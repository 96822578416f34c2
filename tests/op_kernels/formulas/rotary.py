"""Rotary positions, as a formula."""

from __future__ import annotations

import math

import torch

from op_kernels.formulas.truth import Room, Tensors, Truth
from penteract.config.model import RopeScaling


def rope(room: Room, ins: Tensors, weights: Tensors) -> Truth:
    """Each pair of a head's rotated part as a complex number, turned."""
    x, positions = ins
    heads, plain = x.unflatten(-1, (-1, room.attrs["head_size"])), room.attrs["plain_size"]
    size = room.attrs["head_size"] - plain
    rates = torch.tensor(turns(size, room.attrs["theta"], room.attrs["scaling"]), dtype=torch.float64)
    angle = positions[..., None, None] * rates
    a, b = heads[..., plain:].unflatten(-1, (2, size // 2)).unbind(-2)
    length = room.attrs["scaling"].attention_factor if room.attrs["scaling"] else 1.0
    z = torch.complex(a, b) * torch.polar(torch.full_like(angle, length), angle)
    return Truth([torch.cat([heads[..., :plain], z.real, z.imag], -1).flatten(-2)])


def turns(size: int, theta: float, scaling: RopeScaling | None) -> list[float]:
    """How far each pair of `size` features turns with one position. Llama 3.1 stretches by wavelength, YaRN between
    the two features that turn so often over the old positions: the ends of a ramp over whole features."""
    found: list[float] = []
    for i in range(size // 2):
        f = theta ** (-2 * i / size)
        if scaling is not None and scaling.kind == "linear":
            f = f / scaling.factor
        elif scaling is not None and scaling.kind == "yarn":
            old, limits = scaling.original_positions, (scaling.fast_rotations, scaling.slow_rotations)
            low, high = (size * math.log(old / (r * 2 * math.pi)) / (2 * math.log(theta)) for r in limits)
            low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
            ramp = min(1, max(0, (i - low) / (high - low if high != low else 0.001)))
            f = f / scaling.factor * ramp + f * (1 - ramp)
        elif scaling is not None:
            wavelength, old = 2 * math.pi / f, scaling.original_positions
            if wavelength > old / scaling.low_frequency_factor:
                f = f / scaling.factor
            elif wavelength > old / scaling.high_frequency_factor:
                low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
                smooth = (old / wavelength - low) / (high - low)
                f = (1 - smooth) * f / scaling.factor + smooth * f
        found.append(f)
    return found


def turn_packed(room: Room, packed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The first columns turn, which are queries and keys; the rest stay."""
    turned, rest = packed[..., : room.attrs["rotary_columns"]], packed[..., room.attrs["rotary_columns"] :]
    return torch.cat([rope(room, [turned, positions], []).outs[0], rest], -1)
