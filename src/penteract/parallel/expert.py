"""Expert parallelism.

Split      experts; it folds over dp·cp, whose ranks hold other tokens.
Traffic    counts   forward all-to-all of how many copies go where (no gradient)
           send     forward all-to-all of token copies to their experts   backward all-to-all back
           back     forward all-to-all of results to their tokens          backward all-to-all again
Costs      the residual stream top_k times over, there and back; sizes are data, nothing is dropped.
Helps      when experts are many and large; hurts when routing is uneven: the fullest rank sets the pace.
Papers     Lepikhin 2020 (2006.16668); DeepSeek-V3 2024 (2412.19437) §2.1.2
"""

from __future__ import annotations

from penteract.ops.do import Do, Redistribution, Steps, Value, Values, single_collective
from penteract.ops.spec import Dim, Received

counts = single_collective("counts", "ep", "all_to_all")  # [X] -> [X]: this rank's experts, by sender


def _cross(steps: Steps, x: Value, splits: Value, rows: Dim, direction: str) -> Value:
    """Copies travel to the experts ("send": grouped by expert on arrival) or home ("back")."""
    if steps.mesh.size("ep") == 1:
        return x
    if direction == "back":
        (x,) = steps.forward("sort_chunks", x, splits, inverse=True)
    y = steps.collective("all_to_all_v", "ep", x, rows=rows, also_reads=(splits,), direction=direction)
    return steps.forward("sort_chunks", y, splits, inverse=False)[0] if direction == "send" else y


def _redistribution(name: str, direction: str, reverse: str) -> Redistribution:
    def rows(steps: Steps, sent: Dim, way: str) -> Dim:
        return Received(steps.layer) if way == "send" else sent

    def forward(steps: Steps, x: Value, splits: Value, sent: Value) -> tuple[Values, Values]:
        return (_cross(steps, x, splits, rows(steps, sent.shape[0], direction), direction),), (splits, sent)

    def backward(steps: Steps, kept: Values, g: Value) -> Values:
        splits, sent = kept
        return (_cross(steps, g, splits, rows(steps, sent.shape[0], reverse), reverse),)

    return Redistribution(name, forward, backward)


send = _redistribution("send", "send", "back")
back = _redistribution("back", "back", "send")


def split_sizes(do: Do, copies: Value) -> Value:
    """copies [X] of this rank for each expert -> the host's sizes: what goes to and comes from every rank."""
    return do.op("split_sizes", copies, do.redistribute(counts, copies), ranks=do.mesh.size("ep"))[0]
