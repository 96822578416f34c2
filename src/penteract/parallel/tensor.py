"""Tensor and sequence parallelism.

Split      heads, ffn columns and vocabulary (weights); tokens (activations between regions).
Seams      enter   forward all-gather tokens       backward reduce-scatter the gradient
           leave   forward reduce-scatter partials  backward all-gather the gradient
           cross_entropy   two small all-reduces: the rows' maximum, then their sums   backward nothing on the wire
           What `enter` gathered is not kept: remaking "enter" gathers it again for the weight gradients, under the
           input gradients. Drop "enter" from the remade words to hold it instead.
Costs      four passes of the residual stream a block and direction, inside the node or not at all.
Helps      when a layer is too large or too slow for one device; hurts when the pieces become small.
Papers     Shoeybi 2019 (1909.08053) §3; Korthikanti 2022 (2205.05198) §4.2
"""

from __future__ import annotations

from penteract.ops.do import Do, Seam, Steps, Value, Values, lone
from penteract.ops.params import Param

enter = lone("enter", "tp", "all_gather", "reduce_scatter")  # [S@cp·tp, ..] -> [S@cp, ..]
leave = lone("leave", "tp", "reduce_scatter", "all_gather")  # partial [S@cp, ..] -> [S@cp·tp, ..]


def _cross_entropy(steps: Steps, logits: Value, targets: Value) -> tuple[Values, Values]:
    (largest,) = steps.forward("row_max", logits)
    largest = steps.collective("all_reduce", "tp", largest, reduce="max")
    (sums,) = steps.forward("exp_sum", logits, largest, targets, axis="tp")
    sums = steps.collective("all_reduce", "tp", sums)
    loss, log_sum = steps.forward("negative_log_likelihood", sums, largest, targets)
    return (loss,), (logits, log_sum, targets)


def _cross_entropy_gradient(steps: Steps, kept: Values, g: Value) -> Values:
    return steps.forward("cross_entropy_gradient", *kept, g, axis="tp")


cross_entropy = Seam("cross_entropy", _cross_entropy, _cross_entropy_gradient)


def linear_cross_entropy(do: Do, h: Value, w: Param, targets: Value) -> Value:
    """h [S@cp, B, D], w [V@tp, D], targets [S@cp, B] -> Σ of their negative log-likelihoods [], on every tp rank."""
    return do.seam(cross_entropy, do.linear(h, w), targets)
