"""Multi-token prediction: additional layers after the last; each sees and predicts one token further.

DeepSeek-V3 2024 (2412.19437) §2.2, eq. 21-25. Embedding and head are those of the model. As in the released weights, a
depth projects [embedding, hidden] and has its own norm before the head; the next depth continues from the norm's
output.
"""

from __future__ import annotations

from penteract.config.model import ModelSpec
from penteract.model.block import block
from penteract.model.embedding_head import embed, score
from penteract.model.norm import norm
from penteract.ops.do import Do, Value
from penteract.ops.params import Param


def mtp_layers(do: Do, m: ModelSpec, h: Value, sequence_length: int) -> None:
    """h [S@cp·tp, B, D], the head's input -> a loss for each depth, all in one term.   Layer numbers continue."""
    for k in range(1, m.mtp_layers + 1):
        layer = m.layers + k - 1
        h = do.layers([layer], lambda i, x, k=k: _depth(do, m, i, k, x, sequence_length), h)
        h = norm(do, m, f"layers.{layer}.head_norm", h)
        to_head, h = do.fork(h) if k < m.mtp_layers else (h, h)
        score(do, m, to_head, f"targets:{k} ahead", "mtp")


def _depth(do: Do, m: ModelSpec, layer: int, k: int, h: Value, sequence_length: int) -> Value:
    """The hidden state of token i, joined with the embedding of token i + k, through one layer.   h [S@cp·tp, B, D] ->
    same"""
    name = f"layers.{layer}"
    token = norm(do, m, f"{name}.embedding_norm", embed(do, m, f"tokens:{k} ahead", sequence_length))
    both = do.op("join", token, norm(do, m, f"{name}.hidden_norm", h))[0]
    shape = (m.hidden_size, 2 * m.hidden_size)
    together = Param(f"{name}.projection.weight", shape, scale=m.initial_std, matrix=True)
    return block(do, m, layer, do.linear(both, together), sequence_length)
