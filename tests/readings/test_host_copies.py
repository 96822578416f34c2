"""The price of a background save's copies is what ranks plan to copy."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from draws import draws
from layouts import Case
from penteract.config.optimizers import PLAIN, OptimizerKind, OptimizerKinds
from penteract.config.precision.policy import RECIPES
from penteract.engine.session.background.snapshot import SnapshotPlan
from penteract.engine.state.state import allocate
from penteract.readings.composed import Composer
from penteract.readings.memory.host_copies import snapshot_bytes
from strategies import cases

CHANGED = [replace(RECIPES["bf16"], moments="int8"), replace(RECIPES["bf16"], master="fp32")]
PRECISIONS = [*(RECIPES[name] for name in ("fp32", "bf16", "bf16_pure")), *CHANGED]
OPTIMIZERS = [PLAIN, OptimizerKinds(matrices=OptimizerKind("muon", 5))]


@draws(16)
@given(cases(max_ranks=8), st.sampled_from(PRECISIONS), st.sampled_from(OPTIMIZERS))
def test_all_ranks_copy_what_is_priced(case: Case, precision: object, optimizer_kinds: OptimizerKinds) -> None:
    if optimizer_kinds is not PLAIN:
        case = replace(case, layout=replace(case.layout, offload_optimizer=False))
    case = replace(case, precision=precision, optimizer_kinds=optimizer_kinds)  # type: ignore[arg-type]
    layout = case.layout
    programs = [case.compile(rank) for rank in range(layout.world)]
    plans = [SnapshotPlan(p, allocate(p, torch.device("cpu"))) for p in programs]
    small = sum(region.source.nbytes for plan in plans for region in plan.small)
    regions = sum(len(regions) for plan in plans for regions in (*plan.buckets, plan.small))
    copied = sum(plan.size for plan in plans) - small
    composer = Composer(case.model, case.sequence_length, case.compile(0).precision, optimizer_kinds)
    most = snapshot_bytes(composer.bucket_planner, layout) * layout.world
    blocks = 256 * 8 * regions  # whole blocks of quantised moments are copied
    assert copied <= most + 64 * regions + blocks
    if layout.pp == 1 and layout.ep == 1:
        # Padding is priced and not copied: with quantised moments, up to a block for each rank of a bucket.
        sizes = [(b.offsets[-1] + b.params[-1].numel(p.mesh), b.size) for p in programs for b in p.buckets]
        used, padded = (sum(n) for n in zip(*sizes, strict=True))
        assert copied > 0.8 * most * used / padded - 64 * regions
