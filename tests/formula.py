"""An evaluator of printed formulas that knows nothing of how they are made: the text as Python's own syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from fractions import Fraction
from math import ceil, floor

_RAISED = {raised: f"**{n}" for n, raised in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
_AS_PYTHON = str.maketrans({"·": "*", "⌊": "floor(", "⌋": ")", "⌈": "ceil(", "⌉": ")"} | _RAISED)


def read(text: str, numbers: Mapping[str, int] | None = None) -> Fraction:
    """`2·S²·D/(cp·tp)` at some numbers; exact."""
    return _value(ast.parse(text.translate(_AS_PYTHON), mode="eval").body, numbers or {})


def _value(node: ast.expr, numbers: Mapping[str, int]) -> Fraction:
    match node:
        case ast.Constant(value=int(n)):
            return Fraction(n)
        case ast.Name(id=name):
            return Fraction(numbers[name])
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, numbers)
        case ast.Call(func=ast.Name(id=name), args=[inner]):
            return Fraction({"floor": floor, "ceil": ceil}[name](_value(inner, numbers)))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left, numbers), _value(right, numbers)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div():
                    return a / b
                case ast.Pow():
                    return a ** int(b)
    raise ValueError(ast.unparse(node))
