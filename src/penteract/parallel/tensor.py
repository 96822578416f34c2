"""Tensor and sequence parallelism.

Split      heads, ffn columns and vocabulary (weights); tokens (activations between regions).
Traffic    tp_all_gather       forward all-gather tokens         backward reduce-scatter the gradient
           tp_reduce_scatter   forward reduce-scatter partials   backward all-gather the gradient
           cross_entropy   two small all-reduces: the rows' maximum, then their sums   backward none
           linear_cross_entropy   tp_all_gather, linear and cross_entropy for some tokens at a time. In training all of
                   it runs in backward, since a term's scale is known before the step: logits are neither kept nor
                   recomputed.
           With "tp_all_gather" among the recomputed ops, the gathered tokens are not kept: they are gathered again for
           the weight gradients, overlapped with the input gradients. Without it, they are kept.
Costs      the residual stream four times for each block and direction; only inside a node.
Helps      when a layer is too large or too slow for one device; hurts when the shards become small.
Papers     Chowdhery 2022 (2204.02311) §5 (z-loss); Shoeybi 2019 (1909.08053) §3; Korthikanti 2022 (2205.05198) §4.2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penteract.config.layout import Layout
from penteract.ops.do import Do, Redistribution, Steps, Value, Values, single_collective
from penteract.ops.params import Param
from penteract.ops.spec import Spec

# [S@cp·tp, ..] -> [S@cp, ..], and partial sums [S@cp, ..] -> their sum [S@cp·tp, ..]
tp_all_gather = single_collective("tp_all_gather", "tp", "all_gather", "reduce_scatter")
tp_reduce_scatter = single_collective("tp_reduce_scatter", "tp", "reduce_scatter", "all_gather")


_LOGITS = 2**28  # of a chunk, if the layout does not set its tokens
_TOKENS, _MOST_LOGITS = 8192, 2**31  # the fewest for kernels that read logits once, up to so many logits
_TILE = 128  # tokens: products are computed in tiles of so many
# Data that is read several times should stay in a GPU's cache of some 50 MiB: fp32 copies of so many logits, and so
# many elements of a weight gradient that is computed in bf16 outside its bucket.
_FP32_LOGITS, _GRADIENT_ELEMENTS = 2**23, 2**24


def _probabilities(steps: Steps, logits: Value, targets: Value, **attrs: Any) -> Values:
    """logits [s, B, V@tp] -> loss [], log-sum-exp [s, B]; with z, also the z-loss []"""
    (largest,) = steps.forward("row_max", logits)
    largest = steps.collective("all_reduce", "tp", largest, reduce="max")
    (sums,) = steps.forward("exp_sum", logits, largest, targets, axis="tp", **attrs)
    sums = steps.collective("all_reduce", "tp", sums)
    return steps.forward("negative_log_likelihood", sums, largest, targets, **attrs)


def cross_entropy(z: float) -> Redistribution:
    """The loss of logits, [], and with z also the z-loss, []. Both have the same scale, so one gradient serves both."""

    def forward(steps: Steps, logits: Value, targets: Value) -> tuple[Values, Values]:
        loss, log_sum, *squares = _probabilities(steps, logits, targets, z=z)
        return (loss, *squares), (logits, log_sum, targets)

    def backward(steps: Steps, kept: Values, g: Value, *same: Value) -> Values:
        return steps.forward("cross_entropy_gradient", *kept, g, axis="tp", z=z)

    return Redistribution("cross_entropy", forward, backward)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Head and loss, some tokens at a time: h [S@cp·tp, B, D], targets [S@cp, B] -> the loss term `term`.

    w [V@tp, D]. `tokens`: of a chunk; 0: as many as make a moderate block of logits. Only the logits of one chunk exist
    at a time; their gradient overwrites them.
    """

    w: Param
    term: str
    tokens: int
    z: float

    def redistribution(self) -> Redistribution:
        """All chunks as one redistribution: forward computes the loss; in training, backward does everything."""
        return Redistribution("linear_cross_entropy", self._evaluate, self._train, params=(self.w,), ends=True)

    def _evaluate(self, steps: Steps, h: Value, targets: Value) -> tuple[Values, Values]:
        whole = steps.collective("all_gather", "tp", h)
        for x, some in self._chunks(steps, whole, targets):
            self._score(steps, x, some)
        return (), (h, targets)

    def _train(self, steps: Steps, kept: Values) -> Values:
        h, targets = kept
        whole = steps.collective("all_gather", "tp", h)
        found: list[Value] = []
        for x, some in self._chunks(steps, whole, targets):
            logits = self._scored(steps, x, some)
            about: dict[str, Any] = {"params": (self.w,), "columns": self._columns}
            found += steps.input_gradient("logits", (x,), (), (logits,), **about)
            steps.weight_gradient("logits", (x,), (x,), (logits,), **about)
        gradient = found[0] if len(found) == 1 else steps.forward("join_rows", *found)[0]
        return (steps.collective("reduce_scatter", "tp", gradient),)

    def _scored(self, steps: Steps, x: Value, targets: Value) -> Value:
        """-> the gradient of x's logits, whose loss is counted"""
        if "loss" in steps.mesh.layout.fuse and steps.mesh.size("tp") == 1:
            (logits,) = steps.forward("logits", x, params=(self.w,), columns=self._columns)
            (g,) = steps.input_gradient("loss", (steps.value(Spec((), "stat")),), (), (), **self._of_term(steps))
            wide = self._wide(logits)
            found = steps.forward("loss_and_gradient", logits, targets, g, axis="tp", z=self.z, at_once=wide)
            self._count(steps, *found)
            return logits
        logits, log_sum, loss = self._score(steps, x, targets)
        (g,) = steps.input_gradient("loss", (loss,), (), (), **self._of_term(steps))
        steps.forward("logits_gradient", logits, log_sum, targets, g, axis="tp", z=self.z, at_once=self._wide(logits))
        return logits

    def _count(self, steps: Steps, loss: Value, *squares: Value) -> None:
        """Add them to their terms of the loss."""
        steps.forward("loss", loss, **self._of_term(steps))
        for each in squares:
            steps.forward("loss", each, **self._of_term(steps, "z_loss"))

    def _score(self, steps: Steps, x: Value, targets: Value) -> Values:
        """-> logits, log-sum-exp, loss []; the loss is added to its term"""
        (logits,) = steps.forward("logits", x, params=(self.w,), columns=self._columns)
        loss, log_sum, *squares = _probabilities(steps, logits, targets, z=self.z, at_once=self._wide(logits))
        self._count(steps, loss, *squares)
        return logits, log_sum, loss

    def _chunks(self, steps: Steps, h: Value, targets: Value) -> Iterator[Values]:
        """The chunks: rows of h and of targets; all of them if one chunk suffices."""
        s, b, _ = h.shape
        assert isinstance(s, int) and isinstance(b, int)
        rows = max(1, (self.tokens or chunk_tokens(self.w.local_shape(steps.mesh)[0], steps.mesh.layout)) // b)
        last = -(-s // rows) - 1
        if last == 0:
            yield h, targets
            return
        for i in range(last + 1):
            part: dict[str, Any] = {"begin": i * rows, "count": rows if i < last else s - last * rows}
            yield steps.forward("rows", h, **part)[0], steps.forward("rows", targets, **part)[0]

    def _of_term(self, steps: Steps, name: str = "") -> dict[str, Any]:
        return {"name": name or self.term, "scale": self.term, "copies": steps.mesh.size("tp")}

    @property
    def _columns(self) -> int:
        return max(1, _GRADIENT_ELEMENTS // self.w.shape[1])

    @staticmethod
    def _wide(logits: Value) -> int:
        columns = logits.shape[-1]
        assert isinstance(columns, int)
        return max(1, _FP32_LOGITS // columns)


def chunk_tokens(shard: int, layout: Layout) -> int:
    """The default tokens of a chunk, for `shard` rows of the head: whole tiles if possible. With kernels that read
    logits once, more of them: larger products are faster, and weight gradients are added less often."""
    tokens = _LOGITS // shard
    if layout.elementwise == "triton":
        tokens = max(tokens, min(_TOKENS, _MOST_LOGITS // shard))
    return tokens // _TILE * _TILE or tokens


def linear_cross_entropy(do: Do, h: Value, w: Param, targets: Value, term: str, z: float = 0.0) -> None:
    """h [S@cp·tp, B, D], w [V@tp, D], targets [S@cp, B] -> the loss term `term`: the sum of negative log-likelihoods.

    z > 0: also the term "z_loss", the sum over targets of z times the squared log-sum-exp.
    """
    if do.layout.loss == "chunked":
        do.redistribute(Chunks(w, term, do.layout.loss_chunk, z).redistribution(), h, targets)
        return
    logits = do.linear(do.redistribute(tp_all_gather, h), w)
    losses = do.redistribute(cross_entropy(z), logits, targets)
    loss, *squares = losses if z else (losses,)
    do.loss(loss, term, copies="tp")
    for each in squares:
        do.loss(each, "z_loss", copies="tp", scale=term)
