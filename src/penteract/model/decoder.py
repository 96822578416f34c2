"""The whole network, a stage at a time: embed, layers, head and loss."""

from __future__ import annotations

from penteract.model.block import block
from penteract.model.norm import norm
from penteract.ops.do import Do, Value
from penteract.ops.params import Homes, Param, Shard
from penteract.parallel import tensor
from penteract.parallel.pipeline import stage_layers
from penteract.spec.layout import Layout
from penteract.spec.mesh import Mesh
from penteract.spec.model import ModelSpec


def stage(do: Do, m: ModelSpec, number: int, sequence_length: int) -> None:
    """Say stage `number` of the network.   Between stages: [S@cp·tp, B, D]"""
    lay, last = do.layout, do.layout.stages - 1
    b, own = lay.micro_batch_size, sequence_length // lay.cp
    x = _embed(do, m, own, b) if number == 0 else do.receive((own // lay.tp, b, m.hidden_size))
    layers = stage_layers(m.layers, lay.stages)[number]
    x = do.layers(layers, lambda i, x: block(do, m, i, x, sequence_length), x)
    if number < last:
        do.hand_on(x)
        return
    h = do.seam(tensor.enter, norm(do, m, "norm", x))  # [S@cp, B, D]
    w = _table(m, "embedding" if m.tied else "head")
    loss = tensor.linear_cross_entropy(do, h, w, do.input("targets", (own, b)))
    do.loss(loss, "cross_entropy", copies="tp")


def _embed(do: Do, m: ModelSpec, own: int, b: int) -> Value:
    """Token ids [S@cp, B] -> [S@cp·tp, B, D]"""
    x = do.seam(tensor.leave, do.embedding(do.input("tokens", (own, b)), _table(m, "embedding")))
    if m.positions == "learned":
        where = do.input("positions:tp", (own // do.layout.tp, b))
        table = Param("positions.weight", (m.max_positions, m.hidden_size), scale=m.initial_std, decay=False)
        x = do.add(x, do.embedding(where, table))
    return x


def _table(m: ModelSpec, name: str) -> Param:
    return Param(f"{name}.weight", (m.vocab_size, m.hidden_size), (Shard(0, "tp"),), scale=m.initial_std)


def record(m: ModelSpec, mesh: Mesh, number: int, sequence_length: int) -> Do:
    """Record stage `number` for a layout: its tape and its parameters, in order of first use."""
    do = Do(mesh)
    stage(do, m, number, sequence_length)
    return do


def homes(m: ModelSpec, layout: Layout, names: dict[str, int]) -> Homes:
    """parameter name -> pipeline ranks that hold it. `names`: the pipeline rank whose tape says it."""
    tied = {0, (layout.stages - 1) % layout.pp}
    return {n: tuple(sorted(tied)) if m.tied and n == "embedding.weight" else (p,) for n, p in names.items()}
