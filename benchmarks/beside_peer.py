"""torchtitan 0.2.2's side of `beside_torchtitan.py`: one run of its trainer with our batches and clock, in a process of
its own.

    python benchmarks/beside_peer.py CASE MODE OUT.json

Modes:

stock  its own mode: on one GPU autocast over fp32 parameters, on several FSDP2, tensor or pipeline parallelism
fsdp   FSDP2 over one rank: bf16 parameters gathered from fp32 ones, gradients reduced in fp32
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torchtitan.train as titan
from beside_sides import CASES, WARM, Case, Clock, batches, write_record
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import register_train_spec

SPEC = "beside"


class RandomBatches(BaseDataLoader):
    """The batches of both sides."""

    def __init__(self, case: Case, dp_rank: int) -> None:
        self.batches = [x.pin_memory() for x in batches(case, dp_rank)]

    def __iter__(self) -> Iterator[Any]:
        while True:
            for x in self.batches:
                yield {"input": x[:, :-1].contiguous()}, x[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """It has no state."""


class NoText(BaseTokenizer):
    """Not needed: the batches are tokens already."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.eos_id, self.vocabulary = 1, vocabulary

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return [0]

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return self.vocabulary


def register(case: Case) -> None:
    """Register the case as a model of torchtitan."""
    spec = import_module(f"torchtitan.models.{case.peer}").get_train_spec()
    flavor = replace(spec.model_args[case.flavor], vocab_size=case.vocabulary, **case.peer_changes)
    register_train_spec(SPEC, replace(
        spec, model_args={"case": flavor}, build_tokenizer_fn=lambda job_config: NoText(case.vocabulary),
        build_dataloader_fn=lambda dp_world_size, dp_rank, tokenizer, job_config, **more: RandomBatches(case, dp_rank),
    ))  # fmt: skip


def shard_over_one() -> None:
    """Make torchtitan use FSDP2 over a single rank."""
    exists = ParallelDims._mesh_exist
    ParallelDims._mesh_exist = lambda self, name, degree: name == "fsdp" or exists(self, name, degree)
    ParallelDims.fsdp_enabled = property(lambda self: True)


def watch(case: Case, mode: str, out: Path) -> None:
    """Mark the clock after each step, and write the record when training ends. Losses stay on the device until then."""
    clock, losses = Clock(case), list[torch.Tensor]()
    step, loss, train = (getattr(titan.Trainer, n) for n in ("train_step", "forward_backward_step", "train"))

    def train_step(self: Any, data: Any) -> None:
        step(self, data)
        clock.mark()

    def forward_backward_step(self: Any, **about: Any) -> torch.Tensor:
        found = loss(self, **about)
        losses.append(found.detach())
        return found

    def trained(self: Any) -> None:
        train(self)
        kinds = {str(p.dtype).removeprefix("torch.") for part in self.model_parts for p in part.parameters()}
        about = {"mode": mode, "parameters": sorted(kinds), "gradient": "fp32",
                "torchtitan": version("torchtitan"), "torchao": version("torchao")}  # fmt: skip
        record = clock.report([x.item() for x in losses], **about)
        if int(os.environ["RANK"]) == case.gpus - 1:  # it has the last stage of a pipeline, and so the loss
            write_record(record, out)
        if case.gpus > 1:
            torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(0)

    for name, method in (
        ("train_step", train_step),
        ("forward_backward_step", forward_backward_step),
        ("train", trained),
    ):
        setattr(titan.Trainer, name, method)


def arguments(case: Case, folder: Path) -> list[str]:
    """torchtitan's command line."""
    options: dict[str, Any] = {
        "model.name": SPEC, "model.flavor": "case", "training.seq_len": case.sequence_length,
        "training.local_batch_size": case.rank_sequences, "training.steps": case.steps, "metrics.log_freq": 1000,
        "job.dump_folder": folder, "lr_scheduler.warmup_steps": WARM, "optimizer.lr": case.rate, "activation_checkpoint.mode": "none",
    }  # fmt: skip
    pairs = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return [*pairs, "--compile.enable", "--metrics.disable_color_printing", *case.peer_arguments]


def main() -> None:
    name, mode, out = sys.argv[1:]
    case = CASES[name]
    register(case)
    import_module("torchtitan.components.quantization.float8")  # registers its converter
    if mode == "fsdp":
        shard_over_one()
    watch(case, mode, Path(out))
    # Its parser stored the command line as a default argument when it was imported.
    ConfigManager.parse_args.__defaults__ = (arguments(case, Path(out).parent / "torchtitan"),)
    titan.main(titan.Trainer)


if __name__ == "__main__":
    main()
