"""Sizes that carry their formulas: a program recorded with them has formulas as well as numbers.

A `Size` is an int. Comparisons, and so every branch, see only the number: a formula holds for all sizes that take the
same branches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penteract.config.layout import Layout
from penteract.config.model import LatentSpec, ModelSpec, MoESpec
from penteract.ops.expression import Expression


class Size(int):
    """An int with its formula. Sums, products and integer quotients of sizes are sizes; other operations give plain
    ints.

    A quotient without remainder is written as a fraction, since sharded sizes always divide evenly. Any other is
    rounded in its formula too.
    """

    expression: Expression

    def __new__(cls, value: int, expression: Expression | None = None) -> Size:
        """Without `expression`, the formula is the number itself."""
        self = super().__new__(cls, value)
        self.expression = Expression.constant(int(value)) if expression is None else expression
        return self

    @staticmethod
    def named(name: str, value: int) -> Size:
        """A size whose formula is a name of `LEGEND`; `value`: its number in this layout."""
        return Size(value, Expression.symbol(name))

    def __add__(self, other: int, /) -> Size:
        if not isinstance(other, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        return Size(int.__add__(self, other), self.expression.plus(expression_of(other)))

    def __sub__(self, other: int, /) -> Size:
        if not isinstance(other, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        return Size(int.__sub__(self, other), self.expression.plus(expression_of(other), -1))

    def __rsub__(self, other: int, /) -> Size:
        return -self + other

    def __neg__(self) -> Size:
        return Size(int.__neg__(self), Expression().plus(self.expression, -1))

    def __mul__(self, other: int, /) -> Size:
        if not isinstance(other, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        return Size(int.__mul__(self, other), self.expression.times(expression_of(other)))

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: int, /) -> Size:
        if not isinstance(other, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        value, rest = divmod(int(self), int(other))
        quotient = self.expression.divided_by(expression_of(other))
        return Size(value, quotient.floored() if rest else quotient)

    def __rfloordiv__(self, other: int, /) -> Size:
        return Size(int(other)) // self

    def __mod__(self, other: int, /) -> Size:
        if not isinstance(other, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        return self - self // other * other

    def __rmod__(self, other: int, /) -> Size:
        return Size(int(other)) % self


def expression_of(n: int) -> Expression:
    """The formula of a size; a plain number is its own."""
    return n.expression if isinstance(n, Size) else Expression.constant(int(n))


def evaluate(expression: Expression, values: Mapping[str, int]) -> int:
    """The value of a formula for other numbers. Raises ValueError if it is not a whole number."""
    value = expression.evaluate(values)
    if value.denominator != 1:
        raise ValueError(f"{expression.show()} is {value} here: a size is whole")
    return value.numerator


# Which fields are sizes, and their names in `LEGEND`.
_NAMES: Mapping[type, Mapping[str, str]] = {
    ModelSpec: {
        "hidden_size": "D", "heads": "H", "kv_heads": "K", "head_size": "C", "ffn_size": "F", "vocab_size": "V",
        "max_positions": "N",
    },
    MoESpec: {"experts": "X", "top_k": "k", "ffn_size": "Fx", "shared_ffn_size": "Fs"},
    LatentSpec: {"kv_rank": "Dk", "query_rank": "Dq", "plain_size": "P", "rope_size": "R", "value_size": "E"},
    Layout: {
        "dp": "dp", "pp": "pp", "cp": "cp", "tp": "tp", "ep": "ep", "micro_batch_size": "B",
        "gradient_accumulation_steps": "m",
    },
}  # fmt: skip
_DEGREES = ("dp", "pp", "cp", "tp", "ep")


def symbolic(m: ModelSpec, layout: Layout, sequence_length: int) -> tuple[ModelSpec, Layout, Size]:
    """The same values with sizes that carry their names. A degree of 1 has none: the program lacks the collectives that
    more ranks need, so its formulas do not hold for them.

    They compare and hash as the plain ones do: do not use both as keys of one cache.
    """
    model = replace(
        m,
        **_sizes(m),
        moe=None if m.moe is None else replace(m.moe, **_sizes(m.moe)),
        latent=None if m.latent is None else replace(m.latent, **_sizes(m.latent)),
    )
    sizes = _sizes(layout)
    sizes = {field: size for field, size in sizes.items() if size > 1 or field not in _DEGREES}
    cut = replace(layout, **sizes, expert_tp=sizes["tp"] if layout.expert_tp > 1 else 1)
    return model, cut, Size.named("S", sequence_length)


def values(m: ModelSpec, layout: Layout, sequence_length: int) -> dict[str, int]:
    """The number of every name in the formulas of `symbolic`."""
    parts = [part for part in (m, layout, m.moe, m.latent) if part is not None]
    return {"S": sequence_length} | {n: getattr(part, f) for part in parts for f, n in _NAMES[type(part)].items()}


def _sizes(part: ModelSpec | MoESpec | LatentSpec | Layout) -> dict[str, Any]:
    """Fields as named sizes; those that are 0 are left out."""
    return {f: Size.named(n, getattr(part, f)) for f, n in _NAMES[type(part)].items() if getattr(part, f)}
