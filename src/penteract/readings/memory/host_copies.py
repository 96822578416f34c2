"""What a save in the background takes of a host's memory: a copy of what its ranks save, in the dtypes of the state."""

from __future__ import annotations

from penteract.config.layout import Layout
from penteract.config.precision.policy import Policy
from penteract.parallel.data import Bucket
from penteract.readings.buckets.planned import BucketPlanner
from penteract.step.update import optimizer_state_bytes
from penteract.units import Bytes


def snapshot_bytes(planner: BucketPlanner, layout: Layout) -> Bytes:
    """Bytes of a rank, on the pipeline ranks that save most. Replicas of a shard share it by whole parameters: this is
    their mean."""
    most = 0.0
    for r in range(layout.pp):
        plans = planner.counted(layout, planner.runs(layout, r), r)
        most = max(most, sum(n * _of(planner.bucket(layout, plan, r), planner.policy) for plan, n in plans))
    return round(most)


def _of(b: Bucket, precision: Policy) -> float:
    """Moments and master weights of a shard, and its parameters where these are or complete its master weights."""
    kept = optimizer_state_bytes(b.shard_size, precision.keeping(b.moments), b.optimizer_kind)
    if precision.master != "fp32":
        kept += b.shard_size * precision.widths["parameter"]
    return kept / len(b.replicate_ranks)
