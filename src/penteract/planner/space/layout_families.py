"""Layouts in parts: the fields that a search varies together, and the families of layouts that share the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from penteract.config.layout import (
    AttentionKernel,
    Collectives,
    Determinism,
    Elementwise,
    EpMethod,
    ExpertKernel,
    ExpertRows,
    Fusion,
    Layout,
    LossKernel,
)
from penteract.schedule.registry import ScheduleName

Sizes = tuple[tuple[int, int], ...]  # ascending micro-batch sizes, with their accumulation steps


class MemoryOptions(NamedTuple):
    """Fields of `Layout` that change memory, but not which ranks communicate: ZeRO, recomputation, kernels."""

    zero: int
    shard_group: int
    reduce_scatter_once: bool
    reshard_after_step: bool
    recompute: tuple[str, ...]
    determinism: Determinism
    attention: AttentionKernel
    loss: LossKernel
    loss_chunk: int
    elementwise: Elementwise
    fuse: tuple[Fusion, ...]
    experts: ExpertKernel
    collectives: Collectives
    bucket_bytes: int
    offload_optimizer: bool


class Experts(NamedTuple):
    """Fields of `Layout` that say which ranks share experts, and how."""

    ep: int
    expert_tp: int
    ep_method: EpMethod
    expert_rows: ExpertRows
    capacity_percent: int


class Pipeline(NamedTuple):
    """Fields of `Layout` that say what each pipeline rank computes, and in which order."""

    schedule: ScheduleName
    vpp: int
    last_stage_less_layers: int


@cache
def _fields(memory: MemoryOptions) -> Mapping[str, Any]:
    return memory._asdict()


@dataclass(frozen=True, slots=True)
class LayoutFamily:
    """Layouts that differ only in `MemoryOptions` and the micro-batch size. `rest`: all other fields."""

    rest: Mapping[str, Any]
    members: tuple[tuple[MemoryOptions, Sizes], ...]

    def layout(self, memory: MemoryOptions, size: int, steps: int) -> Layout:
        """The member with these options, `size` sequences in a micro-batch and `steps` accumulation steps."""
        return Layout.of(self.rest, **_fields(memory), micro_batch_size=size, gradient_accumulation_steps=steps)

    def runs(self) -> Iterator[tuple[Layout, ...]]:
        """Groups of layouts that differ only in the micro-batch size."""
        for memory, sizes in self.members:
            yield tuple(self.layout(memory, *size) for size in sizes)
