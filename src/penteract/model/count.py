"""Parameter counts, derived from the recorded program, so that no second list of matrices is needed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.model.decoder import part
from penteract.ops.declarations import OPS
from penteract.ops.do import Do
from penteract.ops.spec import size
from penteract.ops.tape import Site


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Elements of a model's parameters.

    `total`      each once, also a tied table
    `active`     those that one token uses: all but the experts that it is not routed to
    `embedding`  in lookup tables
    `matmul`     in matrix products with one token, which take 2·matmul FLOPs forward. A tied table counts as the head,
                 a matrix that is used twice counts twice, an expert that is not visited does not count
    """

    total: int
    active: int
    embedding: int
    matmul: int


def parameters(m: ModelSpec) -> ParameterCounts:
    """Count by recording one layer of each kind and multiplying, whatever the depth."""
    alike = _alike(m)
    do = Do(Mesh(Layout()))
    part(do, m, sorted(alike), 1, first=True, last=True)
    return count(do, m, alike)


def _alike(m: ModelSpec) -> Counter[int]:
    """The first layer of each kind -> how many there are."""
    first: dict[bool, int] = {}
    return Counter(first.setdefault(m.has_experts(layer), layer) for layer in range(m.layers))


def count(do: Do, m: ModelSpec, alike: Counter[int]) -> ParameterCounts:
    """Count what `do` recorded for one token and one rank. Layer i stands for `alike[i]` layers, other layers for one.

    An op's first parameter is its matrix, if it has one.
    """
    times: dict[str, int] = {}
    products: Counter[str] = Counter()  # parameter -> multiply-adds of one token with it
    tables: set[str] = set()
    for site in (op.site for op in do.tape.ops if op.site.params):
        times |= dict.fromkeys(site.params, alike[site.layer] or 1)
        products[site.params[0]] += _multiply_adds(site, m)
        if site.op_name == "embedding":
            tables.add(site.params[0])
    sizes = {name: prod(do.params[name].shape) for name in times}
    visited = {name: min(n, products[name] or n) for name, n in sizes.items()}
    return ParameterCounts(
        total=sum(times[name] * n for name, n in sizes.items()),
        active=sum(times[name] * n for name, n in visited.items()),
        embedding=sum(sizes[name] for name in tables),
        matmul=sum(times[name] * n for name, n in products.items()),
    )


def head_in_layers(m: ModelSpec, sequence_length: int) -> float:
    """The FLOPs of the head, with MTP layers, as a multiple of those of a layer: the mean of all layers, forward."""
    alike = _alike(m)
    do = Do(Mesh(Layout()))
    part(do, m, sorted(alike), sequence_length, first=False, last=True)
    layers = head = 0
    for site in (op.site for op in do.tape.ops if op.site.op_name in OPS):
        flops = _flops(site, sequence_length * (m.moe.top_k if m.moe else 1))
        layers += flops * alike[site.layer]
        head += flops * (site.layer not in alike)
    return head * m.layers / layers


def _multiply_adds(site: Site, m: ModelSpec) -> int:
    """Multiply-adds of one token in an op's forward. In expert ops a token is as many copies as it visits experts."""
    return _flops(site, m.moe.top_k if m.moe else 1) // 2


def _flops(site: Site, copies: int) -> int:
    """FLOPs of an op's forward. `copies`: of tokens, that experts receive."""
    ins = [tuple(size(dim, lambda _: copies) for dim in spec.shape) for spec in site.ins]
    return OPS[site.op_name].declaration.flops("forward", ins, site.weights, site.attrs)
