"""The sections of a run file that are not values of a `RunSpec` themselves: they become a `Layout`, a path or a
folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType

from penteract.config.layout import (
    AttentionKernel,
    Collectives,
    CpMethod,
    Determinism,
    Elementwise,
    EpMethod,
    ExpertKernel,
    ExpertRows,
    Fusion,
    LossKernel,
)
from penteract.config.run import TrackerName
from penteract.schedule.registry import ScheduleName

Count = NewType("Count", int)  # read from 4096, "1M" (10^6) or "1Mi" (2^20)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """dp·tp·pp·cp = world; "auto" dp follows from the number of ranks, or is the smallest that `ep` allows."""

    dp: int | Literal["auto"] = "auto"
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    last_stage_less_layers: int = 0
    expert_tp: int = 1
    schedule: ScheduleName = "1f1b"
    cp_method: CpMethod = "all_gather"
    ep_method: EpMethod | Literal["auto"] = "auto"
    expert_rows: ExpertRows = "exact"
    capacity_percent: int = 150
    zero: int = 0
    shard_group: int = 0
    reduce_scatter_once: bool = False
    reshard_after_step: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """global_batch_size = dp·micro_batch_size·gradient_accumulation_steps, in sequences."""

    sequence_length: int = 1024  # tokens
    micro_batch_size: int | Literal["auto"] = "auto"
    global_batch_size: int = 16
    global_batch_tokens: Count | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySection:
    """Recomputation, offload, and the size of gradient buckets."""

    recompute: Literal["none", "full", "budget"] | tuple[str, ...] = "none"
    budget: float = 0.0
    budget_gib: float = 0.0
    chosen: Literal["none", "full"] | tuple[str, ...] = "none"
    recompute_every: int = 1
    recompute_first: int = 0
    recompute_else: Literal["none", "full"] | tuple[str, ...] = "none"
    offload: Literal["none"] | tuple[str, ...] = "none"
    offload_every: int = 1
    offload_optimizer: bool = False
    bucket_bytes: int = 25 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The kernels of attention, loss and elementwise work, and who does collectives inside a layer."""

    attention: AttentionKernel = "reference"
    loss: LossKernel = "chunked"
    loss_chunk: int = 0
    elementwise: Elementwise = "reference"
    experts: ExpertKernel = "reference"
    collectives: Collectives = "library"
    determinism: Determinism = "off"
    fuse: Literal["none", "all"] | tuple[Fusion, ...] = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSection:
    """How text becomes numbers."""

    source: str = "bytes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Where run folders go, and what else shows the metrics."""

    folder: str = "runs"
    trackers: Literal["none"] | tuple[TrackerName, ...] = "none"
