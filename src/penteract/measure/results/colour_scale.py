"""The colours of heat maps: viridis (CC0), whose steps of lightness are even, also without colours."""

from __future__ import annotations

Rgb = tuple[int, int, int]
_STOPS: tuple[Rgb, ...] = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


def colour(share: float) -> Rgb:
    """The colour of a value between 0 and 1."""
    at = min(max(share, 0.0), 1.0) * (len(_STOPS) - 1)
    i = min(int(at), len(_STOPS) - 2)
    red, green, blue = (round(a + (at - i) * (b - a)) for a, b in zip(_STOPS[i], _STOPS[i + 1], strict=True))
    return red, green, blue


def luminance(rgb: Rgb) -> float:
    """Of a colour, 0 to 1, about as eyes see it."""
    red, green, blue = rgb
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


def is_dark(rgb: Rgb) -> bool:
    """Whether a text on it should be white."""
    return luminance(rgb) < 0.45
