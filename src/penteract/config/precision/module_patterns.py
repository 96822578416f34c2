"""Precision by module: patterns over the names of parameters, and what those that match have otherwise than the rest.

A pattern is a shell's (`*`, `?`, `[0-3]`), and `*` matches dots too. Names are those of checkpoints, such as
`embedding.weight` and `layers.3.attention.q.weight`. Where several match, the last one decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from penteract.config.precision.fp8 import Fp8
from penteract.errors import BadInput

# linears: in what a layer's linears multiply, by the name of their weight; moments: what the optimizer keeps.
Part = Literal["linears", "moments"]
PARTS: tuple[Part, ...] = ("linears", "moments")
FP8 = "fp8"  # of `linears`: as the recipe of FP8 has it


@dataclass(frozen=True, slots=True)
class Pattern:
    """`part` of the parameters whose names match is `value`. As a word: `embedding*:moments=fp32`."""

    names: str
    part: Part
    value: str

    @staticmethod
    def of(word: str) -> Pattern:
        """BadInput where the word is none."""
        names, _, said = word.rpartition(":")
        asked, _, value = said.partition("=")
        for part in PARTS:
            if names and part == asked and value:
                return Pattern(names, part, value)
        raise BadInput("PATTERN", "not a pattern of names with what they have", where="precision.modules",
                       found=word[:80], allowed="NAMES:moments=DTYPE, NAMES:linears=DTYPE",
                       fix="--precision.modules 'embedding*:moments=fp32'")  # fmt: skip

    def matches(self, name: str) -> bool:
        """Whether a parameter's name matches the shell pattern `names`, case and all."""
        return fnmatchcase(name, self.names)

    def __str__(self) -> str:
        """The word that `of` reads: `embedding*:moments=fp32`."""
        return f"{self.names}:{self.part}={self.value}"


def decided(patterns: Iterable[Pattern], part: Part, name: str, otherwise: str) -> str:
    """What a parameter has."""
    for pattern in patterns:
        if pattern.part == part and pattern.matches(name):
            otherwise = pattern.value
    return otherwise


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """Which linears of a model are in FP8. The head and what else is in no layer never is."""

    fp8: Fp8 | None = None
    patterns: tuple[Pattern, ...] = ()

    def of(self, weight: str) -> Fp8 | None:
        """The recipe of a linear, by its weight's name; None where it is as the rest of the policy is."""
        if self.fp8 is None or not weight.startswith("layers."):
            return None
        return self.fp8 if decided(self.patterns, "linears", weight, FP8) == FP8 else None

    def of_experts(self, weight: str) -> Fp8 | None:
        """The same of experts' matrices, which are in FP8 where the recipe says so."""
        return self.of(weight) if self.fp8 is not None and self.fp8.experts else None
