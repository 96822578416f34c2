"""The one look: colours that colour-blind readers tell apart, and texts that can be read on them, in both themes."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import pytest

from penteract.explore.answers.profiles.profile_lanes import KINDS as OF_PROFILES
from penteract.explore.answers.schedules.lane_kinds import KINDS, TimeKind
from penteract.explore.server.routes import ASSETS

CSS = (ASSETS / "look.css").read_text(encoding="utf-8")
OWNERS = ("parameters", "gradients", "optimizer", "activations", "other")
DIMENSIONS = ("dp", "tp", "pp", "cp", "ep")
Colour = tuple[float, float, float]

# Linear RGB as seen without one kind of cone (Machado, Oliveira, Fernandes 2009, severity 1).
SEEN = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}  # fmt: skip


def tokens(theme: str) -> dict[str, Colour]:
    """The colours of a theme, as linear RGB."""
    light, dark = CSS.split(":root {")[1].split("}")[0], CSS.split(':root[data-theme="dark"] {')[1].split("}")[0]
    text = light if theme == "light" else light + dark
    found = {name: linear(code) for name, code in re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text)}
    same = re.findall(r"--([\w-]+): var\(--([\w-]+)\);", text)
    return found | {name: found[other] for name, other in same}


def linear(code: str) -> Colour:
    parts = [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return red, green, blue


def lab(colour: Colour) -> Colour:
    r, g, b = (min(1.0, max(0.0, c)) for c in colour)
    xyz = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505, 0.2126 * r + 0.7152 * g + 0.0722 * b, (
        0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089  # fmt: skip
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def apart(a: Colour, b: Colour, seen: str) -> float:
    """How far two colours are apart (CIE 1976), as seen."""
    one, other = (lab(tuple(sum(m * v for m, v in zip(row, c, strict=True)) for row in SEEN[seen])) for c in (a, b))  # type: ignore[arg-type]
    return sum((p - q) ** 2 for p, q in zip(one, other, strict=True)) ** 0.5


def contrast(a: Colour, b: Colour) -> float:
    one, other = sorted((0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2] for c in (a, b)), reverse=True)
    return (one + 0.05) / (other + 0.05)


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_are_told_apart(theme: str, seen: str) -> None:
    found = tokens(theme)
    near = {
        (a, b): round(apart(found[a], found[b], seen))
        for a, b in combinations(OWNERS, 2) if apart(found[a], found[b], seen) < 15
    }  # fmt: skip
    assert near == {}
    for a, b in pairwise(OWNERS):  # those that touch
        assert apart(found[a], found[b], seen) > 20, (a, b)


@pytest.mark.parametrize("kinds", [KINDS, OF_PROFILES], ids=["schedules", "profiles"])
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_kinds_of_time_are_told_apart(theme: str, seen: str, kinds: tuple[TimeKind, ...]) -> None:
    """Those in one bar, and those in the strips below it, which have no bubble beside them."""
    found = tokens(theme)
    for other in (False, True):
        names = [f"lane-{kind.name}" for kind in kinds if kind.other_stream == other]
        pairs = [*combinations(names, 2)] if not other else [*pairwise(names)]
        near = {
            (a, b): round(apart(found[a], found[b], seen)) for a, b in pairs if apart(found[a], found[b], seen) < 15
        }
        assert near == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_can_be_read(theme: str) -> None:
    found = tokens(theme)
    pairs = [(f"on-{name}", name) for name in OWNERS]
    pairs += [(f"on-lane-{kind.name}", f"lane-{kind.name}") for kind in (*KINDS, *OF_PROFILES) if not kind.other_stream]
    pairs += [(ink, paper) for ink in ("ink", "ink-2", "ink-3") for paper in ("paper", "sheet", "sunk")]
    pairs += [("good", "good-paper"), ("bad", "bad-paper"), ("on-accent", "accent")]
    pairs += [(name, paper) for name in DIMENSIONS for paper in ("sheet", "sunk")]
    assert {pair: round(contrast(found[pair[0]], found[pair[1]]), 2) for pair in pairs
            if contrast(found[pair[0]], found[pair[1]]) < 4.5} == {}  # fmt: skip


def test_one_colour_for_each_dimension_and_no_other_below_the_tokens() -> None:
    assert len({*(tokens("light")[name] for name in DIMENSIONS)}) == len(DIMENSIONS)
    rules = CSS.split("/* ---- the page")[1]
    assert set(re.findall(r"#[0-9a-fA-F]{3,8}\b", rules)) <= {"#fff", "#0000001f", "#00000030", "#memory", "#fits"}


def test_both_ways_to_the_dark_theme_are_the_same() -> None:
    chosen = CSS.split(':root[data-theme="dark"] {')[1].split("}")[0]
    preferred = CSS.split(':root:not([data-theme="light"]) {')[1].split("}")[0]
    assert chosen.split() == preferred.split()
