"""Embedding and head: from token ids to the residual stream, and from there to a loss term."""

from __future__ import annotations

from penteract.config.model import ModelSpec
from penteract.ops.do import Do, Value
from penteract.ops.params import Param, Shard
from penteract.parallel import tensor


def embed(do: Do, m: ModelSpec, ids: str, sequence_length: int) -> Value:
    """Token ids [S@cp, B], the input named `ids` -> [S@cp·tp, B, D]"""
    own = (sequence_length // do.layout.cp, do.layout.micro_batch_size)
    return do.redistribute(tensor.tp_reduce_scatter, do.embedding(do.input(ids, own), _table(m, "embedding")))


def score(do: Do, m: ModelSpec, h: Value, targets: str, term: str) -> None:
    """h [S@cp·tp, B, D], normalised -> the loss term `term`, with the input named `targets`, [S@cp, B]."""
    s, b, _ = h.shape
    assert isinstance(s, int) and isinstance(b, int)
    own = do.input(targets, (s * do.layout.tp, b))
    w = _table(m, "embedding" if m.tied else "head")
    tensor.linear_cross_entropy(do, h, w, own, term, m.z_loss_coefficient)


def _table(m: ModelSpec, name: str) -> Param:
    return Param(f"{name}.weight", (m.vocab_size, m.hidden_size), (Shard(0, "tp"),), scale=m.initial_std)
