"""The collectives: the shape of each one's result, and which tensor's bytes count as its size.

The size of a collective is the bytes of its output for a gather, of its input for all others.
"""

from __future__ import annotations

from penteract.ops.spec import Dim, Spec

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "all_to_all_v", "shift")


def _scale(spec: Spec, dim: int, times: int, over: int) -> Spec:
    shape: list[Dim] = list(spec.shape)
    n = shape[dim]
    if not isinstance(n, int) or n * times % over:
        raise ValueError(f"dim {dim} of {spec.shape} cannot be cut into {over}")
    shape[dim] = n * times // over
    return Spec(tuple(shape), spec.role)


def result(kind: str, x: Spec, n: int, attrs: dict[str, object]) -> Spec:
    """The spec of `kind` over `n` ranks applied to `x`.

    all_gather, reduce_scatter   along dim 0
    all_reduce, shift            as x
    all_to_all                   as x; dim 0 is cut, and its i-th part comes from rank i
    all_to_all_v                 rows given by `rows`: [.., D] -> [rows, D]
    """
    if kind == "all_gather":
        return _scale(x, 0, n, 1)
    if kind == "reduce_scatter":
        return _scale(x, 0, 1, n)
    if kind in ("all_reduce", "shift"):
        return x
    if kind == "all_to_all":
        return _scale(x, 0, n, n)
    if kind == "all_to_all_v":
        rows = attrs["rows"]
        return Spec((rows, *x.shape[1:]), x.role)  # type: ignore[arg-type]
    raise ValueError(f"no collective named {kind}")


def payload(kind: str, x: Spec, y: Spec) -> Spec:
    """The tensor whose bytes count as the collective's: the larger one. `x`: what goes in, `y`: what comes out."""
    return y if kind == "all_gather" else x
