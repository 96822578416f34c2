"""The whole network, a stage at a time: embed, layers, head and loss."""

from __future__ import annotations

from collections.abc import Sequence

from penteract.config.layout import Layout
from penteract.config.mesh import Mesh
from penteract.config.model import ModelSpec
from penteract.config.precision.module_patterns import LinearLayers
from penteract.model.block import block
from penteract.model.embedding_head import embed, score
from penteract.model.mtp import mtp_layers
from penteract.model.norm import norm
from penteract.ops.do import Do, Value
from penteract.ops.fuse import fuse
from penteract.ops.params import OwningPpRanks, Param
from penteract.parallel.pipeline import stage_layers


def stage(do: Do, m: ModelSpec, number: int, sequence_length: int) -> None:
    """Record stage `number` of the network.   Between stages: [S@cp·tp, B, D]"""
    layers = stage_layers(m.layers, do.layout)[number]
    part(do, m, layers, sequence_length, first=number == 0, last=number == do.layout.stages - 1)


def part(do: Do, m: ModelSpec, layers: Sequence[int], sequence_length: int, *, first: bool, last: bool) -> None:
    """Record the layers `layers`, with the embedding if `first` and the head if `last`."""
    x = _embed(do, m, sequence_length) if first else do.receive(_stream(do, m, sequence_length))
    x = do.layers(layers, lambda i, x: block(do, m, i, x, sequence_length), x)
    if last:
        _head(do, m, x, sequence_length)
    else:
        do.send(x)
    fuse(do.tape, do.params, do.mesh)


def _stream(do: Do, m: ModelSpec, sequence_length: int) -> tuple[int, int, int]:
    """The residual stream's shape [S@cp·tp, B, D]."""
    lay = do.layout
    return sequence_length // lay.cp // lay.tp, lay.micro_batch_size, m.hidden_size


def _head(do: Do, m: ModelSpec, x: Value, sequence_length: int) -> None:
    """[S@cp·tp, B, D] -> the loss"""
    h = norm(do, m, "norm", x)
    if not m.mtp_layers:
        score(do, m, h, "targets", "cross_entropy")
        return
    h, to_mtp = do.fork(h)
    score(do, m, h, "targets", "cross_entropy")
    mtp_layers(do, m, to_mtp, sequence_length)


def _embed(do: Do, m: ModelSpec, sequence_length: int) -> Value:
    """Token ids [S@cp, B] -> [S@cp·tp, B, D]"""
    x = embed(do, m, "tokens", sequence_length)
    if m.positions == "learned":
        where = do.input("positions:tp", _stream(do, m, sequence_length)[:2])
        table = Param("positions.weight", (m.max_positions, m.hidden_size), scale=m.initial_std, decay=False)
        x = do.add(x, do.embedding(where, table))
    return x


def record(
    m: ModelSpec, mesh: Mesh, number: int, sequence_length: int, linear_layers: LinearLayers | None = None
) -> Do:
    """Record stage `number` for a layout: its tape and its parameters, in order of first use."""
    do = Do(mesh, linear_layers)
    stage(do, m, number, sequence_length)
    return do


def owning_pp_ranks(m: ModelSpec, layout: Layout, names: dict[str, int]) -> OwningPpRanks:
    """parameter name -> pipeline ranks that hold it. `names`: parameter -> the pipeline rank that recorded it."""
    both = shared(m)
    if both.isdisjoint(names):
        return {name: (p,) for name, p in names.items()}
    stages = layout.placement.locations
    ends = tuple(sorted({stages[0][0], stages[-1][0]}))
    return {name: ends if name in both else (p,) for name, p in names.items()}


def shared(m: ModelSpec) -> frozenset[str]:
    """The parameters that the first and the last stage both use."""
    return frozenset({"embedding.weight"}) if m.tied or m.mtp_layers else frozenset()
