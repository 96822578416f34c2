"""Tensor and sequence parallelism.

Split      heads, ffn columns and vocabulary (weights); tokens (activations between regions).
Traffic    enter   forward all-gather tokens       backward reduce-scatter the gradient
           leave   forward reduce-scatter partials  backward all-gather the gradient
           cross_entropy   two small all-reduces: the rows' maximum, then their sums   backward nothing on the wire
           linear_cross_entropy   enter, linear and cross_entropy of some tokens at a time; in training all of it in
                   backward, since a term's scale is known before the step: no logits are kept, none made twice
           What `enter` gathered is not kept: recomputing "enter" gathers it again for the weight gradients, under the
           input gradients. Drop "enter" from the recomputed ops to hold it instead.
Costs      four passes of the residual stream a block and direction, inside the node or not at all.
Helps      when a layer is too large or too slow for one device; hurts when the pieces become small.
Papers     Chowdhery 2022 (2204.02311) §5 (z-loss); Shoeybi 2019 (1909.08053) §3; Korthikanti 2022 (2205.05198) §4.2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penteract.config.layout import Layout
from penteract.ops.do import Do, Redistribution, Steps, Value, Values, lone
from penteract.ops.params import Param
from penteract.ops.spec import Spec

enter = lone("enter", "tp", "all_gather", "reduce_scatter")  # [S@cp·tp, ..] -> [S@cp, ..]
leave = lone("leave", "tp", "reduce_scatter", "all_gather")  # partial [S@cp, ..] -> [S@cp·tp, ..]


_LOGITS = 2**28  # of a chunk, where nobody says how many tokens it has
_TOKENS, _MOST_LOGITS = 8192, 2**31  # the least that suits kernels that pass over them once, while they are no more
_TILE = 128  # tokens: products are cut into tiles of so many
# What is passed over several times should stay in a GPU's cache, some 50 MiB: fp32 copies of so many logits, and so
# many elements of a weight gradient, made in bf16 beside its bucket.
_WIDE, _BESIDE = 2**23, 2**24


def _probabilities(steps: Steps, logits: Value, targets: Value, **attrs: Any) -> Values:
    """logits [s, B, V@tp] -> loss [], log-sum-exp [s, B]; with z, also that of z-loss []"""
    (largest,) = steps.forward("row_max", logits)
    largest = steps.collective("all_reduce", "tp", largest, reduce="max")
    (sums,) = steps.forward("exp_sum", logits, largest, targets, axis="tp", **attrs)
    sums = steps.collective("all_reduce", "tp", sums)
    return steps.forward("negative_log_likelihood", sums, largest, targets, **attrs)


def cross_entropy(z: float) -> Redistribution:
    """The loss of logits, [], and with z that of z-loss, []. Both have the same scale: one gradient is that of both."""

    def forward(steps: Steps, logits: Value, targets: Value) -> tuple[Values, Values]:
        loss, log_sum, *squares = _probabilities(steps, logits, targets, z=z)
        return (loss, *squares), (logits, log_sum, targets)

    def backward(steps: Steps, kept: Values, g: Value, *same: Value) -> Values:
        return steps.forward("cross_entropy_gradient", *kept, g, axis="tp", z=z)

    return Redistribution("cross_entropy", forward, backward)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The end of the network, some tokens at a time: h [S@cp·tp, B, D], targets [S@cp, B] -> the loss's term `term`.

    w [V@tp, D]. `tokens` of a chunk; 0: as many as make a moderate block of logits. Logits of one chunk exist at once,
    and become their gradient where they lie.
    """

    w: Param
    term: str
    tokens: int
    z: float

    def redistribution(self) -> Redistribution:
        """The chunks as an end of the network: it scores in forward, and in training does everything in backward."""
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
        """-> logits, log-sum-exp, loss [], which is counted"""
        (logits,) = steps.forward("logits", x, params=(self.w,), columns=self._columns)
        loss, log_sum, *squares = _probabilities(steps, logits, targets, z=self.z, at_once=self._wide(logits))
        self._count(steps, loss, *squares)
        return logits, log_sum, loss

    def _chunks(self, steps: Steps, h: Value, targets: Value) -> Iterator[Values]:
        """Rows of h and of targets: all, where one chunk holds them."""
        s, b, _ = h.shape
        assert isinstance(s, int) and isinstance(b, int)
        rows = max(1, (self.tokens or self._suiting(steps)) // b)
        last = -(-s // rows) - 1
        if last == 0:
            yield h, targets
            return
        for i in range(last + 1):
            part: dict[str, Any] = {"begin": i * rows, "count": rows if i < last else s - last * rows}
            yield steps.forward("rows", h, **part)[0], steps.forward("rows", targets, **part)[0]

    def _suiting(self, steps: Steps) -> int:
        return chunk_tokens(self.w.local_shape(steps.mesh)[0], steps.mesh.layout)

    def _of_term(self, steps: Steps, name: str = "") -> dict[str, Any]:
        return {"name": name or self.term, "scale": self.term, "copies": steps.mesh.size("tp")}

    @property
    def _columns(self) -> int:
        return max(1, _BESIDE // self.w.shape[1])

    @staticmethod
    def _wide(logits: Value) -> int:
        columns = logits.shape[-1]
        assert isinstance(columns, int)
        return max(1, _WIDE // columns)


def chunk_tokens(shard: int, layout: Layout) -> int:
    """Tokens of a chunk, where nobody says, of `shard` rows of the head: whole tiles if they can be. Kernels that pass
    over logits once want more of them: products of more tokens are faster, and their weight gradients fewer."""
    tokens = _LOGITS // shard
    if layout.elementwise == "triton":
        tokens = max(tokens, min(_TOKENS, _MOST_LOGITS // shard))
    return tokens // _TILE * _TILE or tokens


def linear_cross_entropy(do: Do, h: Value, w: Param, targets: Value, term: str, z: float = 0.0) -> None:
    """h [S@cp·tp, B, D], w [V@tp, D], targets [S@cp, B] -> the loss's term `term`: their negative log-likelihoods.

    z > 0: of each target z times its squared log-sum-exp too, the term "z_loss".
    """
    if do.layout.loss == "chunked":
        do.redistribute(Chunks(w, term, do.layout.loss_chunk, z).redistribution(), h, targets)
        return
    logits = do.linear(do.redistribute(enter, h), w)
    losses = do.redistribute(cross_entropy(z), logits, targets)
    loss, *squares = losses if z else (losses,)
    do.loss(loss, term, copies="tp")
    for each in squares:
        do.loss(each, "z_loss", copies="tp", scale=term)
