"""Precision patterns over parameter names, checked against the names of a model."""

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
    """Parameter names: those of each layer, and all others. `op_names`: for each weight of a layer that may be in FP8,
    the op that multiplies by it."""

    layers: tuple[tuple[str, ...], ...]
    others: tuple[str, ...]
    op_names: Mapping[str, str]

    def of(self, what: Part, policy: Policy) -> Iterator[str]:
        """The names to which patterns of the part `what` apply."""
        every = (name for some in (*self.layers, self.others) for name in some)
        return every if what == "moments" else filter(self.fp8_by_default(policy).__contains__, every)

    def fp8_by_default(self, policy: Policy) -> frozenset[str]:
        """The weights that are in FP8 if no pattern matches them."""
        experts = policy.fp8 is not None and policy.fp8.experts
        return frozenset(name for name, op_name in self.op_names.items() if op_name == "linear" or experts)


@cache
def _names(m: ModelSpec) -> _Names:
    """The names in the recorded program: one layer of each kind gives those of all."""
    first = {m.has_experts(layer): layer for layer in reversed(range(m.layers))}
    do = Do(Mesh(Layout()))
    part(do, m, sorted(first.values()), 1, first=True, last=True)
    sites = [op.site for op in do.tape.ops if op.site.op_name in ("linear", "expert_linear") and op.site.layer >= 0]
    op_of = {site.params[0]: site.op_name for site in sites}
    own = {layer: [n for n in do.params if n.startswith(f"layers.{layer}.")] for layer in first.values()}
    layers = list[tuple[str, ...]]()
    op_names = {n: op_name for n, op_name in op_of.items() if not any(n in some for some in own.values())}
    for layer in range(m.layers):
        recorded = first[m.has_experts(layer)]
        named = {n: n.replace(f"layers.{recorded}.", f"layers.{layer}.", 1) for n in own[recorded]}
        layers.append(tuple(named.values()))
        op_names |= {here: op_of[there] for there, here in named.items() if there in op_of}
    others = tuple(n for n in do.params if not any(n in some for some in own.values()))
    return _Names(tuple(layers), others, op_names)


@cache
def check_modules(m: ModelSpec, policy: Policy) -> None:
    """Refuse a pattern that matches no parameter of the model, patterns that leave no linear layer in FP8, and FP8
    experts in a model without experts."""
    if policy.fp8 is not None and policy.fp8.experts and m.moe is None:
        raise BadInput("PRECISION", "the model has no experts", where="precision.fp8_experts", found="true",
                       allowed="false", fix="--precision.fp8_experts false")  # fmt: skip
    for pattern in policy.modules:
        found = list(_names(m).of(pattern.part, policy))
        if not any(map(pattern.matches, found)):
            raise _unmatched(pattern, found)
    if policy.modules and policy.fp8 is not None:
        linear_layers = policy.linear_layers(m.layers, m.mtp_layers)
        if not any(map(linear_layers.of, _names(m).fp8_by_default(policy))):
            raise BadInput("PRECISION", "leaves no linear layer in FP8", where="precision.modules",
                           found=", ".join(map(str, policy.modules))[:80], allowed="one linear layer in FP8 or more",
                           fix="--precision.dtype bf16")  # fmt: skip


def _unmatched(pattern: Pattern, found: list[str]) -> BadInput:
    """The error, with the nearest patterns that match: one parameter in all layers, or all of one layer."""
    layers = dict.fromkeys(".".join([*n.split(".")[:2], "*"]) for n in found if n.startswith("layers."))
    every = dict.fromkeys(anonymous(n) for n in found)
    near = get_close_matches(pattern.names, [*every, *layers], _SHOWN, cutoff=0)
    what = "no linear layer has such a name" if pattern.part == "linears" else "no parameter has such a name"
    return BadInput("PATTERN", what, where="precision.modules", found=str(pattern)[:80], allowed=", ".join(near),
                    fix=f"--precision.modules '{near[0]}:{pattern.part}={pattern.value}'")  # fmt: skip


def anonymous(name: str) -> str:
    """The name without its layer: `layers.*.norm1.weight`."""
    parts = name.split(".")
    return ".".join([parts[0], "*", *parts[2:]]) if parts[0] == "layers" else name


@cache
def first_like(m: ModelSpec, policy: Policy) -> tuple[int, ...]:
    """For each layer, the first equal one: with or without experts, and each parameter in the same precision.

    Raises BadInput as `check_modules` does.
    """
    check_modules(m, policy)
    plain = not policy.modules and (policy.fp8 is None or not policy.fp8.bf16_layers(m.layers, m.mtp_layers))
    linear_layers, first = policy.linear_layers(m.layers, m.mtp_layers), dict[object, int]()

    def signature(layer: int) -> object:
        names = () if plain else _names(m).layers[layer]
        return m.has_experts(layer), *((policy.moments_of(n), linear_layers.of(n)) for n in names)

    return tuple(first.setdefault(signature(layer), layer) for layer in range(m.layers))
