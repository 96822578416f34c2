"""Patterns over names, held against the names that a model has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.config.precision.module_patterns import Part, Pattern
from penteract.config.precision.policy import Policy
from penteract.errors import BadInput
from penteract.model.decoder import part
from penteract.ops.do import Do

_SHOWN = 3  # names in a message


@dataclass(frozen=True, slots=True)
class _Names:
    """Of parameters: those of each layer, and all others. `op_names`: which one multiplies by those of layers that may
    be in FP8."""

    layers: tuple[tuple[str, ...], ...]
    others: tuple[str, ...]
    op_names: Mapping[str, str]

    def of(self, what: Part, policy: Policy) -> Iterator[str]:
        """Those that have such a part."""
        every = (name for some in (*self.layers, self.others) for name in some)
        return every if what == "moments" else filter(self.in_codes(policy).__contains__, every)

    def in_codes(self, policy: Policy) -> frozenset[str]:
        """Those that are in FP8 where nothing is said of them."""
        experts = policy.fp8 is not None and policy.fp8.experts
        return frozenset(name for name, op_name in self.op_names.items() if op_name == "linear" or experts)


@cache
def _names(m: ModelSpec) -> _Names:
    """Read off the recorded program: one layer of each kind tells those of all."""
    first = {m.has_experts(layer): layer for layer in reversed(range(m.layers))}
    do = Do(Mesh(Layout()))
    part(do, m, sorted(first.values()), 1, first=True, last=True)
    sites = [op.site for op in do.tape.ops if op.site.op_name in ("linear", "expert_linear") and op.site.layer >= 0]
    said = {site.params[0]: site.op_name for site in sites}
    own = {layer: [n for n in do.params if n.startswith(f"layers.{layer}.")] for layer in first.values()}
    layers = list[tuple[str, ...]]()
    op_names = {n: op_name for n, op_name in said.items() if not any(n in some for some in own.values())}
    for layer in range(m.layers):
        recorded = first[m.has_experts(layer)]
        named = {n: n.replace(f"layers.{recorded}.", f"layers.{layer}.", 1) for n in own[recorded]}
        layers.append(tuple(named.values()))
        op_names |= {here: said[there] for there, here in named.items() if there in said}
    others = tuple(n for n in do.params if not any(n in some for some in own.values()))
    return _Names(tuple(layers), others, op_names)


@cache
def check_modules(m: ModelSpec, policy: Policy) -> None:
    """Refuse a pattern that no parameter of the model matches, patterns that leave no linear in FP8, and experts in FP8
    where there are none."""
    if policy.fp8 is not None and policy.fp8.experts and m.moe is None:
        raise BadInput("PRECISION", "the model has no experts", where="precision.fp8_experts", found="true",
                       allowed="false", fix="--precision.fp8_experts false")  # fmt: skip
    for pattern in policy.modules:
        found = list(_names(m).of(pattern.part, policy))
        if not any(map(pattern.matches, found)):
            raise _unmatched(pattern, found)
    if policy.modules and policy.fp8 is not None:
        linear_layers = policy.linear_layers(m.layers, m.mtp_layers)
        if not any(map(linear_layers.of, _names(m).in_codes(policy))):
            raise BadInput("PRECISION", "leaves no linear in FP8", where="precision.modules",
                           found=", ".join(map(str, policy.modules))[:80], allowed="one linear in FP8 or more",
                           fix="--precision.dtype bf16")  # fmt: skip


def _unmatched(pattern: Pattern, found: list[str]) -> BadInput:
    """With the nearest patterns that match: a parameter of any layer, or all of one layer."""
    layers = dict.fromkeys(".".join([*n.split(".")[:2], "*"]) for n in found if n.startswith("layers."))
    every = dict.fromkeys(anonymous(n) for n in found)
    near = get_close_matches(pattern.names, [*every, *layers], _SHOWN, cutoff=0)
    what = "no linear of a layer has such a name" if pattern.part == "linears" else "no parameter has such a name"
    return BadInput("PATTERN", what, where="precision.modules", found=str(pattern)[:80], allowed=", ".join(near),
                    fix=f"--precision.modules '{near[0]}:{pattern.part}={pattern.value}'")  # fmt: skip


def anonymous(name: str) -> str:
    """`layers.*.norm1.weight` for that of any layer."""
    parts = name.split(".")
    return ".".join([parts[0], "*", *parts[2:]]) if parts[0] == "layers" else name


@cache
def first_like(m: ModelSpec, policy: Policy) -> tuple[int, ...]:
    """Of each layer the first that is like it: with experts or without, and in the same precision, name by name.

    BadInput where `check_modules` has it.
    """
    check_modules(m, policy)
    plain = not policy.modules and (policy.fp8 is None or not policy.fp8.beside(m.layers, m.mtp_layers))
    linear_layers, first = policy.linear_layers(m.layers, m.mtp_layers), dict[object, int]()

    def told(layer: int) -> object:
        names = () if plain else _names(m).layers[layer]
        return m.has_experts(layer), *((policy.moments_of(n), linear_layers.of(n)) for n in names)

    return tuple(first.setdefault(told(layer), layer) for layer in range(m.layers))
