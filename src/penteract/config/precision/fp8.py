"""FP8 linear layers: scaling and formats of their operands, and which linear layers stay in the policy's compute dtype.

Micikevicius 2022 (2209.05433) for the formats; DeepSeek-V3 2024 (2412.19437) §3.3 for blocks; Peng 2023 (2310.18313).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from penteract.config.layout import Layout
from penteract.errors import BadInput

Fp8Scaling = Literal["tensorwise", "delayed", "rowwise", "blockwise"]
Format = Literal["e4m3", "e5m2"]

KINDS: tuple[Fp8Scaling, ...] = get_args(Fp8Scaling)
LARGEST: Mapping[Format, float] = MappingProxyType({"e4m3": 448.0, "e5m2": 57344.0})
PRODUCT_MULTIPLE = 16  # the sizes of a product must be multiples of it
ALONG_FEATURES: tuple[Fp8Scaling, ...] = ("rowwise", "blockwise")  # a token's scales depend only on its own features

# The ranks whose largest absolute value decides a scale: results depend on the micro-batch, but not on the layout.
GROUPS: Mapping[Fp8Scaling, str] = {
    "tensorwise": "the ranks that hold one micro-batch (cp and tp)",
    "delayed": "all ranks of one pipeline rank, over the last steps; in the first step, each rank's own",
    "rowwise": "the ranks that share a row",
    "blockwise": "one rank, which holds the whole block",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8:
    """A recipe. A linear layer's three products (y = x·wᵀ, and with the gradient g of y, g·w and gᵀ·x) are in FP8.

    kind               tensorwise  one scale per tensor, from this micro-batch
                       delayed     one scale per tensor, from the largest value of the last `history` steps
                       rowwise     one scale for each row along which a product sums, so two sets for each tensor
                       blockwise   one scale for `block` such elements; for weights, for a square block
    operand, gradient  formats of activations and weights, and of their gradients
    first, last        numbers of first and last layers that are not in FP8; the head and routers never are
    powers             scales are rounded up to powers of two; those of whole tensors in e5m2 always are (`powers_of`)
    gather             under ZeRO 3 weights are gathered in FP8, each with one scale that ranks agree on once a step
    experts            experts' matrices too, in forward and input gradients. Their weight gradients sum over whichever
                       tokens are on a rank, and stay in the policy's compute dtype
    fast_accumulation  whether a GPU sums products of gradients in fewer bits too, as it does in forward passes

    Raises BadInput if they do not go together.
    """

    kind: Fp8Scaling
    operand: Format = "e4m3"
    gradient: Format = "e5m2"
    first: int = 0
    last: int = 0
    powers: bool = False
    history: int = 16
    block: int = 128
    gather: bool = False
    experts: bool = False
    fast_accumulation: bool = False

    def __post_init__(self) -> None:
        """Check the fields, alone and together. Raises BadInput, PRECISION."""
        choices = {"kind": KINDS, "operand": tuple(LARGEST), "gradient": tuple(LARGEST)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise _refusal(name, getattr(self, name), ", ".join(allowed), allowed[0])
        if min(self.first, self.last) < 0:
            raise _refusal("bf16_layers", (self.first, self.last), "0 or more of each", "[1, 1]")
        if self.block < PRODUCT_MULTIPLE or self.block % PRODUCT_MULTIPLE:
            raise _refusal("block", self.block, f"multiples of {PRODUCT_MULTIPLE}", "128")
        if self.history < 1:
            raise _refusal("history", self.history, "1 or more", "16")
        if self.gather and self.kind != "tensorwise":
            raise _refusal("gather", f"true in fp8_{self.kind}", "true in fp8_tensorwise",
                           "false, or --precision.dtype fp8_tensorwise")  # fmt: skip
        if self.experts and self.kind not in ALONG_FEATURES:  # which tokens share a rank depends on the layout
            raise _refusal("experts", f"true in fp8_{self.kind}, whose scales depend on all tokens of a rank",
                           f"true in {' and '.join(f'fp8_{kind}' for kind in ALONG_FEATURES)}",
                           "false, or --precision.dtype fp8_rowwise")  # fmt: skip
        if self.fast_accumulation and self.kind == "blockwise":
            raise _refusal("fast_accumulation", "true in fp8_blockwise, whose blocks are summed in fp32",
                           "true in the other recipes", "false")  # fmt: skip

    def powers_of(self, name: Format) -> bool:
        """Whether scales of data in this format are powers of two. Those of e5m2 are, where a tensor has one scale: a
        larger one then rounds numbers alike (`sampled_rows.py`)."""
        return self.powers or (self.kind == "tensorwise" and name == "e5m2")

    @property
    def unit(self) -> int:
        """A product's three sizes must be multiples of this."""
        return self.block if self.kind == "blockwise" else PRODUCT_MULTIPLE

    def bf16_layers(self, layers: int, ahead: int = 0) -> tuple[int, ...]:
        """The first and last layers, of so many, that are not in FP8. `ahead`: MTP layers, which are treated as the
        last.

        Raises BadInput if no other layer is left.
        """
        if self.first + self.last >= layers:
            raise _refusal("bf16_layers", (self.first, self.last), f"fewer than the {layers} layers", "[1, 1]")
        return (*range(self.first), *(range(layers - self.last, layers + ahead) if self.last else ()))

    @property
    def unusual(self) -> tuple[str, ...]:
        """In words, how it differs from the usual recipe of its kind."""
        standard = usual(self.kind)
        descriptions = {
            f"{self.operand} and {self.gradient}": (self.operand, self.gradient)
            != (standard.operand, standard.gradient),
            f"first {self.first} and last {self.last} layers in bf16": self.first or self.last,
            "powers of two": self.powers,
            f"scales of {self.history} steps": self.history != standard.history,
            f"blocks of {self.block}": self.block != standard.block,
            "gathered in FP8": self.gather,
            "experts too": self.experts,
            "fast accumulation": self.fast_accumulation,
        }
        return tuple(words for words, differs in descriptions.items() if differs)

    def __str__(self) -> str:
        """The kind, then what differs from the usual recipe of that kind."""
        return ", ".join([self.kind, *self.unusual])


def usual(kind: Fp8Scaling) -> Fp8:
    """The usual recipe of a kind. With blocks, gradients do not need the wider range of e5m2 (DeepSeek-V3 2024)."""
    return Fp8(kind=kind, gradient="e4m3" if kind == "blockwise" else "e5m2")


def check_fp8(fp8: Fp8 | None, layout: Layout) -> None:
    """Refuse a recipe that a layout cannot follow."""
    if fp8 is not None and fp8.experts and layout.pads_rows:
        raise BadInput("FP8", "experts' products in FP8 take sizes that the host reads",
                       where="parallel.expert_rows", found=layout.expert_rows, allowed="exact",
                       fix="--parallel.expert_rows exact, or --precision.fp8_experts false")  # fmt: skip
    _check_gather(fp8, layout)


def _check_gather(fp8: Fp8 | None, lay: Layout) -> None:
    """Refuse FP8 gathering in a layout that does not gather weights."""
    if fp8 is None or not fp8.gather or (lay.zero == 3 and (lay.shard_group or lay.dp * lay.cp) > 1):
        return
    if lay.zero != 3:
        found, allowed, fix = f"zero = {lay.zero}", "zero = 3", "zero 3"
    elif lay.dp * lay.cp > 1:
        found, allowed, fix = "shard_group = 1", "0, or 2 or more", "shard_group 0"
    else:
        found, allowed, fix = "dp·cp = 1", "2 or more", "dp 2"
    raise BadInput("FP8", "weights are gathered in FP8 only where ZeRO 3 shards them",
                   where="precision.fp8_gather", found=found, allowed=allowed,
                   fix=f"--parallel.{fix}, or --precision.fp8_gather false")  # fmt: skip


def _refusal(name: str, found: object, allowed: str, fix: str) -> BadInput:
    return BadInput("PRECISION", "no such recipe of FP8", where=f"precision.fp8_{name}", found=found, allowed=allowed,
                    fix=f"--precision.fp8_{name} {fix}")  # fmt: skip
