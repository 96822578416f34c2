"""HOW it is laid out: five degrees and what goes with them, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["afab", "1f1b", "interleaved", "zb_h1"]
ContextMethod = Literal["gather", "ring", "exchange"]
AttentionBody = Literal["reference", "flash", "cudnn"]
LossBody = Literal["reference", "chunked"]

SCHEDULES: tuple[Schedule, ...] = ("afab", "1f1b", "interleaved", "zb_h1")
ZERO_STAGES = (0, 1, 2, 3)
ATTENTION_BODIES: tuple[AttentionBody, ...] = ("reference", "flash", "cudnn")
LOSS_BODIES: tuple[LossBody, ...] = ("reference", "chunked")
CONTEXT_METHODS: tuple[ContextMethod, ...] = ("gather", "ring", "exchange")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to split a training step over `world` ranks.

    dp·tp·pp·cp = world; `ep` folds over dp·cp. `vpp` is the number of chunks a pipeline rank holds.
    `remake` names the words whose results are dropped after forward and computed again in backward.

    zero             what is cut over the ranks that hold the same parameters: 1 what the optimizer keeps, 2 gradients
                     too, 3 parameters too, which are then gathered where they are used
    shard_group      places of dp·cp, neighbours, that share one copy of what is cut (HSDP); 0: all of them
    whole_gradients  of ZeRO 3: gradients of micro-batches add up in whole buffers, summed over ranks once a step
    keep_gathered    of ZeRO 3: parameters stay gathered from their first use to the end of the step
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    expert_tp: int = 1  # 1: each tensor rank routes its own tokens to whole experts; tp: experts are split too
    schedule: Schedule = "1f1b"
    context_method: ContextMethod = "gather"
    micro_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    zero: int = 0
    shard_group: int = 0
    whole_gradients: bool = False
    keep_gathered: bool = False
    remake: tuple[str, ...] = ("enter",)
    attention: AttentionBody = "reference"  # which body of the word: plain torch, or a fused kernel of a GPU
    loss: LossBody = "reference"  # chunked: logits of some tokens at a time, all of it in backward
    loss_chunk: int = 0  # those tokens; 0: as many as a moderate block of logits has
    bucket_bytes: int = 25 * 2**20  # of one flat gradient bucket; 0: one for each parameter

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def global_batch_size(self) -> int:
        """In sequences."""
        return self.dp * self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def stages(self) -> int:
        return self.pp * self.vpp
