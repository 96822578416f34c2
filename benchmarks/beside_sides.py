"""Cases, batches and the clock of both sides of `beside_torchtitan.py`.

There are four batches of random tokens, which are used in turn. A model that trains memorises them, so its loss falls.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import torch

DRAWN = 4  # batches
STEPS, MEASURED = 18, 10  # steps of a run; the last ten are measured
WARM = 2  # steps until the learning rate is full
UNFINISHED = "the process ended in profiled steps"  # the field `not_profiled` of a run that no rank replaced


@dataclass(frozen=True)
class Case:
    """One model on `gpus` GPUs. Ours is `model` with `changes`; torchtitan's is `flavor` of `peer` with `peer_changes`.
    A step has `sequences` of each data rank (0: one micro-batch); `layout` is what ours needs beside the fastest kernels."""

    name: str
    model: str
    changes: Mapping[str, Any]
    peer: str
    flavor: str
    peer_changes: Mapping[str, Any]
    sequence_length: int
    micro_batch_size: int
    vocabulary: int
    precision: str = "bf16"
    peer_arguments: tuple[str, ...] = ()
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])  # of our model
    our_precision: Mapping[str, Any] = field(default_factory=dict[str, Any])  # that the peer has no option for
    gpus: int = 1
    sequences: int = 0
    layout: Mapping[str, Any] = field(default_factory=dict[str, Any])
    steps: int = STEPS
    rate: float = 1e-4  # of learning
    documents: int = 0  # that share a sequence of ours; torchtitan's is one
    peer_modes: tuple[str, ...] = ()  # of torchtitan, on several GPUs: without FSDP it computes tp and pp in fp32

    @property
    def data_ranks(self) -> int:
        """Ranks with sequences of their own."""
        return self.layout.get("dp", 1)

    @property
    def rank_sequences(self) -> int:
        """Sequences of a step on each data rank."""
        return self.sequences or self.micro_batch_size

    @property
    def tokens(self) -> int:
        """Tokens of a step on all GPUs."""
        return self.sequence_length * self.rank_sequences * self.data_ranks


_FP8 = ("--model.converters", "quantize.linear.float8", "--quantize.linear.float8.filter_fqns", "output")
_A: dict[str, Any] = {
    "model": "llama-3.1-8b", "changes": {"layers": 8}, "peer": "llama3", "flavor": "8B", "peer_changes": {"n_layers": 8},
    "sequence_length": 8192, "micro_batch_size": 2, "vocabulary": 128_256,
}  # fmt: skip
_B: dict[str, Any] = {
    "model": "llama-3.2-1b", "changes": {"tied": False}, "peer": "llama3", "flavor": "8B",
    "peer_changes": {"dim": 2048, "n_layers": 16, "ffn_dim_multiplier": 1.5}, "vocabulary": 128_256,
}  # fmt: skip
_TWO: dict[str, Any] = {
    "model": "llama-3.1-8b", "changes": {}, "peer": "llama3", "flavor": "8B", "peer_changes": {}, "sequence_length": 8192,
    "vocabulary": 128_256, "gpus": 2,
}  # fmt: skip
_FOUR: dict[str, Any] = _TWO | {"gpus": 4}
_PIPELINE = ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "1F1B",
             "--parallelism.pipeline_parallel_microbatch_size", "1")  # fmt: skip
CASES = {case.name: case for case in (
    Case("A1", **_A),
    Case("A1_fp8", **_A, precision="fp8_tensorwise", peer_arguments=_FP8),
    Case("A1_fp8_fast", **_A, precision="fp8_tensorwise", peer_arguments=_FP8,
         our_precision={"fp8_fast_accumulation": True}),
    Case("A1_documents", **_A, documents=8),
    Case("B1", **_B, sequence_length=4096, micro_batch_size=4),
    Case("B1_documents", **_B, sequence_length=4096, micro_batch_size=4, documents=4),
    Case("E1_documents", **_B, sequence_length=32_768, micro_batch_size=1, documents=2),
    Case("E1", **_B, sequence_length=32_768, micro_batch_size=1),
    Case("F1", "qwen3-30b-a3b", {"layers": 4}, "qwen3", "30B-A3B", {"n_layers": 4, "max_seq_len": 4096}, 4096, 4, 151_936,
         parts={"moe": {"balance": "none"}}),
    Case("A2", **_TWO, peer_modes=("stock",), micro_batch_size=1, layout={"dp": 2, "zero": 1}),
    Case("tp2", **_TWO, peer_modes=("fsdp",), micro_batch_size=2, layout={"tp": 2},
         peer_arguments=("--parallelism.tensor_parallel_degree", "2")),
    Case("pp2", **_TWO, peer_modes=("fsdp",), micro_batch_size=1, sequences=16, steps=13, peer_arguments=_PIPELINE, layout={
        "pp": 2, "schedule": "interleaved", "vpp": 8, "last_stage_less_layers": 1, "gradient_accumulation_steps": 16}),
    Case("A4", **_FOUR, peer_modes=("stock",), micro_batch_size=2, layout={"dp": 4, "zero": 2}),
    # As little memory as torchtitan's: what is cheap is made again.
    Case("A4_recomputed", **_FOUR, peer_modes=("stock",), micro_batch_size=2,
         layout={"dp": 4, "zero": 2, "recompute": ("rms_norm", "swiglu")}),
    Case("A4_fp8", **_FOUR, peer_modes=("stock",), micro_batch_size=2, layout={"dp": 4, "zero": 2}, precision="fp8_tensorwise",
         peer_arguments=(*_FP8, "--quantize.linear.float8.enable_fsdp_float8_all_gather",
                         "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp")),
    Case("C4", **_FOUR, peer_modes=("stock",), micro_batch_size=2, layout={"dp": 2, "tp": 2, "zero": 1, "recompute": ()},
         peer_arguments=("--parallelism.tensor_parallel_degree", "2")),
    Case("D4", **_FOUR, peer_modes=("stock",), micro_batch_size=1, sequences=16, steps=13,
         peer_arguments=(*_PIPELINE, "--parallelism.fsdp_reshard_after_forward", "never"), layout={
             "dp": 2, "pp": 2, "zero": 1, "schedule": "interleaved", "vpp": 8, "last_stage_less_layers": 1,
             "gradient_accumulation_steps": 16}),
    # One sequence a step: at the others' rate its loss falls and rises again.
    Case("E4", **_FOUR | {"sequence_length": 131_072}, micro_batch_size=1, steps=15, rate=3e-5, layout={
        "tp": 4, "recompute": ("tp_all_gather", "rms_norm", "swiglu"), "fuse": ("norm", "mlp", "qkv", "loss")}),
    Case("F4", "qwen3-30b-a3b", {"layers": 16}, "qwen3", "30B-A3B", {"n_layers": 16, "max_seq_len": 4096}, 4096, 4,
         151_936, parts={"moe": {"balance": "none"}}, gpus=4, peer_modes=("stock",), layout={
             "dp": 4, "ep": 2, "ep_method": "all_gather", "zero": 1},
         peer_arguments=("--parallelism.expert_parallel_degree", "4")),
)}  # fmt: skip


def batches(case: Case, dp_rank: int = 0) -> list[torch.Tensor]:
    """The batches of a data rank, [sequences, length + 1] each, on the host."""
    generator = torch.Generator().manual_seed(1234 + dp_rank)
    shape = (case.rank_sequences, case.sequence_length + 1)
    return [torch.randint(0, case.vocabulary, shape, generator=generator) for _ in range(DRAWN)]


def started_ranks(gpus: int) -> tuple[list[str], dict[str, str]]:
    """What python is told before the script of a side, so that it runs on each of `gpus`, and the environment."""
    with socket.create_server(("127.0.0.1", 0)) as free:  # another call may run on another GPU of this host
        port = str(free.getsockname()[1])
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "4"}
    if gpus > 1:
        return ["-m", "torch.distributed.run", f"--nproc-per-node={gpus}", f"--master-port={port}"], environment
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [], environment | alone


class Clock:
    """Times optimizer steps. `mark()` records a CUDA event at the end of each step, without waiting for the device."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.events: list[torch.cuda.Event] = []
        self.begun = 0.0

    def mark(self) -> None:
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()
        if len(self.events) == self.case.steps - MEASURED:
            torch.cuda.reset_peak_memory_stats()
            self.begun = time.time()

    def report(self, losses: list[float], device: str = "cuda", **more: Any) -> dict[str, Any]:
        """The record of a run, after its last step; with several GPUs the largest times and bytes of all ranks, which meet
        by tensors on `device`. `more`: further fields."""
        torch.cuda.synchronize()
        ended = time.time()
        mine = [a.elapsed_time(b) for a, b in pairwise(self.events)]
        mine += [torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30]
        all_ranks = torch.tensor(mine, dtype=torch.float64, device=device)
        if self.case.gpus > 1:
            torch.distributed.all_reduce(all_ranks, torch.distributed.ReduceOp.MAX)
        *every, allocated, reserved = all_ranks.tolist()
        took = every[-MEASURED:]
        median_ms = median(took)
        return {
            "tok_s_gpu": self.case.tokens / self.case.gpus / median_ms * 1e3, "median_ms": median_ms,
            "spread_ms": [min(took), max(took)], "step_ms": every, "allocated_gib": allocated, "reserved_gib": reserved,
            "losses": losses, "rate": self.case.rate,
            "learns": all(map(isfinite, losses)) and losses[-1] < losses[0],
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "between": [self.begun, ended], **more,
        }  # fmt: skip


def write_record(record: Mapping[str, Any], out: Path) -> None:
    """Write the record for the process that started this one: whole or not at all."""
    fresh = out.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(record))
    fresh.replace(out)
