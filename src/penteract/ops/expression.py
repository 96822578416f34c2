"""Formulas in normal form: sums of products of named sizes, with integer exponents, negative ones too.

Like terms are collected, and equal factors of numerator and denominator cancel, so `(S/cp)·cp` is `S`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd, lcm
from typing import Literal

# What each name stands for, in the order in which factors are printed.
LEGEND: Mapping[str, str] = {
    "B": "sequences of a micro-batch",
    "S": "tokens of a sequence",
    "D": "hidden size",
    "H": "attention heads",
    "K": "KV heads",
    "C": "head dim",
    "P": "no-RoPE head dim (MLA)",
    "R": "RoPE head dim (MLA)",
    "E": "value head dim (MLA)",
    "Dk": "KV latent rank (kv_lora_rank)",
    "Dq": "query latent rank (q_lora_rank)",
    "F": "MLP hidden size",
    "X": "experts",
    "k": "experts per token (top-k)",
    "Fx": "MLP hidden size of an expert",
    "Fs": "MLP hidden size of the shared experts",
    "V": "vocabulary",
    "N": "learned positions",
    "dp": "data-parallel ranks",
    "pp": "pipeline ranks",
    "cp": "context-parallel ranks",
    "tp": "tensor-parallel ranks",
    "ep": "expert-parallel ranks",
    "m": "micro-batches of a step, on each data-parallel rank",
}
_PLACE = {name: place for place, name in enumerate(LEGEND)}
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Bracketed:
    """A formula that is not a polynomial: rounded down ("⌊") or up ("⌈"), or a sum in a denominator ("(")."""

    kind: Literal["⌊", "⌈", "("]
    inside: Expression

    def show(self, numbers: Mapping[str, int] | None) -> str:
        """The formula in its brackets; with `numbers`, values instead of names."""
        return self.kind + self.inside.show(numbers) + {"⌊": "⌋", "⌈": "⌉", "(": ")"}[self.kind]

    def evaluate(self, values: Mapping[str, int]) -> Fraction:
        """The value of the formula for the given values of names, rounded as `kind` says. Raises KeyError for a missing
        name."""
        value = self.inside.evaluate(values)
        match self.kind:
            case "⌊":
                return Fraction(value.numerator // value.denominator)
            case "⌈":
                return Fraction(-(-value.numerator // value.denominator))
            case _:
                return value


Atom = str | Bracketed
Monomial = frozenset[tuple[Atom, int]]  # atoms and their exponents, never 0
Number = int | Fraction
_ONE: Monomial = frozenset()


@dataclass(frozen=True, slots=True)
class Expression:
    """Σ of coefficient · monomial. No coefficient is 0."""

    terms: Mapping[Monomial, Number] = field(default_factory=dict[Monomial, Number])

    def __hash__(self) -> int:
        """Independent of the order of terms, so that equal formulas have one hash."""
        return hash(frozenset(self.terms.items()))

    @staticmethod
    def symbol(name: str) -> Expression:
        """The formula of a single name of `LEGEND`."""
        return Expression({frozenset({(name, 1)}): 1})

    @staticmethod
    def constant(n: int) -> Expression:
        """The formula of a constant; zero has no terms."""
        return Expression({_ONE: n} if n else {})

    # ---- arithmetic ------------------------------------------------------------------------------------------

    def plus(self, other: Expression, times: Number = 1) -> Expression:
        """self + times·other"""
        terms = dict(self.terms)
        for monomial, n in other.terms.items():
            if total := _int_if_whole(terms.get(monomial, 0) + times * n):
                terms[monomial] = total
            else:
                del terms[monomial]
        return Expression(terms)

    def times(self, other: Expression) -> Expression:
        """The product of two formulas, multiplied out."""
        if len(other.terms) == 1 and _ONE in other.terms:
            n = other.terms[_ONE]
            return Expression({monomial: _int_if_whole(n * a) for monomial, a in self.terms.items()})
        total = Expression()
        for monomial, n in other.terms.items():
            product = {_product(monomial, each): _int_if_whole(n * a) for each, a in self.terms.items()}
            total = total.plus(Expression(product)) if total.terms else Expression(product)
        return total

    def divided_by(self, other: Expression) -> Expression:
        """The exact quotient, not rounded."""
        if len(other.terms) == 1:
            ((monomial, n),) = other.terms.items()
            return self.times(Expression({_inverse(monomial): _int_if_whole(Fraction(1, 1) / n)}))
        return self._long_division(other) or self.times(Expression({frozenset({(Bracketed("(", other), -1)}): 1}))

    def _long_division(self, other: Expression) -> Expression | None:
        """The quotient by a sum, if it divides evenly; else None."""
        atoms = sorted({a for terms in (self.terms, other.terms) for m in terms for a, _ in m}, key=_sort_key)
        first = _leading(other, atoms)
        left, found = self, Expression()
        for _ in range(len(self.terms)):  # no exact quotient of our formulas has more terms than that
            lead = _leading(left, atoms)
            ratio = _int_if_whole(Fraction(left.terms[lead]) / other.terms[first])
            part = Expression({_product(lead, _inverse(first)): ratio})
            found, left = found.plus(part), left.plus(part.times(other), -1)
            if not left.terms:
                return found
        return None

    def floored(self) -> Expression:
        """⌊self⌋; if it is negative, written as -⌈-self⌉."""
        if all(n < 0 for n in self.terms.values()):
            up = Bracketed("⌈", Expression().plus(self, -1))
            return Expression({frozenset({(up, 1)}): -1})
        return Expression({frozenset({(Bracketed("⌊", self), 1)}): 1})

    # ---- evaluating and printing -----------------------------------------------------------------------------

    def evaluate(self, values: Mapping[str, int]) -> Fraction:
        """The value of the formula for the given values of names. Raises KeyError for a missing name."""
        total = Fraction(0)
        for monomial, n in self.terms.items():
            product = Fraction(n)
            for atom, power in monomial:
                value = Fraction(values[atom]) if isinstance(atom, str) else atom.evaluate(values)
                product *= value**power
            total += product
        return total

    def symbols(self) -> set[str]:
        """The names of `LEGEND` in it."""
        atoms = {a for m in self.terms for a, _ in m}
        return {n for a in atoms for n in ({a} if isinstance(a, str) else a.inside.symbols())}

    def show(self, numbers: Mapping[str, int] | None = None) -> str:
        """`2·B·S·D/(cp·tp)`; with `numbers`, values instead of names."""
        if not self.terms:
            return "0"
        factor, monomial = _common(self.terms)
        rest = {_product(m, _inverse(monomial)): _int_if_whole(n / factor) for m, n in self.terms.items()}
        above, below = _factors(factor, monomial, numbers)
        if len(rest) > 1:
            ordered = sorted(rest.items(), key=lambda t: [(_sort_key(a), -n) for a, n in _ordered(t[0])])
            inner = " + ".join(Expression({m: n}).show(numbers) for m, n in ordered).replace("+ -", "- ")
            above = [*above, f"({inner})" if above or below or factor < 0 else inner]
        top = "-" * (factor < 0) + ("·".join(above) or "1")
        if not below:
            return top
        bottom = "·".join(below)
        return f"{top}/({bottom})" if len(below) > 1 else f"{top}/{bottom}"


def _factors(factor: Fraction, monomial: Monomial, numbers: Mapping[str, int] | None) -> tuple[list[str], list[str]]:
    """Factors of numerator and denominator, without the sign."""
    above = [str(abs(factor.numerator))] if abs(factor.numerator) != 1 else []
    below = [str(factor.denominator)] if factor.denominator != 1 else []
    for atom, power in _ordered(monomial):
        (above if power > 0 else below).append(_power(atom, abs(power), numbers))
    return above, below


def _power(atom: Atom, power: int, numbers: Mapping[str, int] | None) -> str:
    shown = atom if numbers is None or isinstance(atom, Bracketed) else str(numbers[atom])
    text = shown if isinstance(shown, str) else shown.show(numbers)
    return text if power == 1 else text + str(power).translate(_RAISED)


def _int_if_whole(n: Number) -> Number:
    return n.numerator if isinstance(n, Fraction) and n.denominator == 1 else n


def _product(a: Monomial, b: Monomial) -> Monomial:
    if not a or not b:
        return a or b
    powers = dict(a)
    for atom, n in b:
        powers[atom] = powers.get(atom, 0) + n
    return frozenset((atom, n) for atom, n in powers.items() if n)


def _inverse(m: Monomial) -> Monomial:
    return frozenset((atom, -n) for atom, n in m)


def _leading(e: Expression, atoms: Iterable[Atom]) -> Monomial:
    """The leading monomial in lexicographic order of the exponents of `atoms`; products preserve this order."""
    return max(e.terms, key=lambda m: [dict(m).get(atom, 0) for atom in atoms])


def _common(terms: Mapping[Monomial, Number]) -> tuple[Fraction, Monomial]:
    """The common factor of all terms: the largest number that leaves integers, and each atom's lowest exponent."""
    numbers = [Fraction(n) for n in terms.values()]
    factor = Fraction(gcd(*(n.numerator for n in numbers)), lcm(*(n.denominator for n in numbers)))
    powers = [dict(m) for m in terms]
    lowest = {atom: min(p.get(atom, 0) for p in powers) for p in powers for atom in p}
    sign = -1 if all(n < 0 for n in numbers) else 1
    return sign * factor, frozenset((atom, n) for atom, n in lowest.items() if n)


def _sort_key(atom: Atom) -> tuple[int, str]:
    return (_PLACE.get(atom, len(_PLACE)), atom) if isinstance(atom, str) else (len(_PLACE) + 1, atom.show(None))


def _ordered(m: Monomial) -> list[tuple[Atom, int]]:
    return sorted(m, key=lambda item: _sort_key(item[0]))
