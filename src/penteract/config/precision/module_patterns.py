"""Precision by module: patterns over parameter names, and the precision of the parameters that match.

A pattern is a shell's (`*`, `?`, `[0-3]`), and `*` matches dots too. Names are those of checkpoints, such as
`embedding.weight` and `layers.3.attention.q.weight`. Where several match, the last one decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from penteract.config.precision.fp8 import Fp8
from penteract.errors import BadInput

# linears: the dtype in which a linear layer multiplies, by the name of its weight; moments: that of optimizer moments.
Part = Literal["linears", "moments"]
PARTS: tuple[Part, ...] = get_args(Part)
FP8 = "fp8"  # of `linears`: as in the FP8 recipe


@dataclass(frozen=True, slots=True)
class Pattern:
    """`part` of the parameters whose names match is `value`. As text: `embedding*:moments=fp32`."""

    names: str
    part: Part
    value: str

    @staticmethod
    def of(word: str) -> Pattern:
        """The pattern of a text such as `embedding*:moments=fp32`. Raises BadInput if it is not one."""
        names, _, setting = word.rpartition(":")
        key, _, value = setting.partition("=")
        for part in PARTS:
            if names and part == key and value:
                return Pattern(names, part, value)
        raise BadInput("PATTERN", "not a pattern with a part and a dtype", where="precision.modules",
                       found=word[:80], allowed="NAMES:moments=DTYPE, NAMES:linears=DTYPE",
                       fix="--precision.modules 'embedding*:moments=fp32'")  # fmt: skip

    def matches(self, name: str) -> bool:
        """Whether a parameter's name matches the shell pattern `names`, case-sensitively."""
        return fnmatchcase(name, self.names)

    def __str__(self) -> str:
        """The text that `of` reads: `embedding*:moments=fp32`."""
        return f"{self.names}:{self.part}={self.value}"


def decided(patterns: Iterable[Pattern], part: Part, name: str, otherwise: str) -> str:
    """The value of the last pattern that matches a parameter; `otherwise` if none does."""
    for pattern in patterns:
        if pattern.part == part and pattern.matches(name):
            otherwise = pattern.value
    return otherwise


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """Which linear layers of a model are in FP8. The head, and all else outside the layers, never is."""

    fp8: Fp8 | None = None
    patterns: tuple[Pattern, ...] = ()

    def of(self, weight: str) -> Fp8 | None:
        """The recipe of a linear layer, by its weight's name; None if it is not in FP8."""
        if self.fp8 is None or not weight.startswith("layers."):
            return None
        return self.fp8 if decided(self.patterns, "linears", weight, FP8) == FP8 else None

    def of_experts(self, weight: str) -> Fp8 | None:
        """The same for experts' matrices, which are in FP8 only if the recipe has `experts`."""
        return self.of(weight) if self.fp8 is not None and self.fp8.experts else None
