"""HOW it is laid out: five degrees and what goes with them, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from penteract.schedule.registry import ScheduleName, schedule_of
from penteract.schedule.schedule import Placement

CpMethod = Literal["all_gather", "ring", "ulysses"]
AttentionKernel = Literal["reference", "fa4_documents", "fa4", "flash", "cudnn"]
LossKernel = Literal["reference", "chunked"]
Elementwise = Literal["reference", "triton"]
ExpertKernel = Literal["reference", "grouped", "quack"]
Fusion = Literal["norm", "mlp", "qkv", "loss"]

ZERO_STAGES = (0, 1, 2, 3)
# Those of a package of its own before those of torch, and in each the fastest last.
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = ("reference", "fa4_documents", "fa4", "flash", "cudnn")
LOSS_KERNELS: tuple[LossKernel, ...] = ("reference", "chunked")
ELEMENTWISE: tuple[Elementwise, ...] = ("reference", "triton")
EXPERT_KERNELS: tuple[ExpertKernel, ...] = ("reference", "grouped", "quack")
FUSIONS: tuple[Fusion, ...] = ("norm", "mlp", "qkv", "loss")
CP_METHODS: tuple[CpMethod, ...] = ("all_gather", "ring", "ulysses")


class Edit(NamedTuple):
    """What becomes of a layer's results from its forward to its backward: the ops whose are made again, and those
    whose are kept on the host."""

    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()


PLAIN = Edit()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to split a training step over `world` ranks.

    dp·tp·pp·cp = world; `ep` folds over dp·cp. `vpp` is the number of chunks a pipeline rank holds.
    `recompute` names the ops whose results are dropped after forward and computed again in backward: in every
    `recompute_every`-th layer of a stage, the first of them always, or in the first `recompute_first` layers (0: in
    all); `recompute_else` are those of the other layers.
    `offload` names what is kept on the host instead, in every `offload_every`-th layer of a stage: "layer_inputs" are
    the layers' inputs, all that full recomputation keeps; "*" is all that is kept.
    `offload_optimizer` keeps what the optimizer keeps of this rank's shards there too.

    zero                 what is cut over the ranks that hold the same parameters: 1 what the optimizer keeps, 2
                         gradients too, 3 parameters too, which are then gathered where they are used
    shard_group          places of dp·cp, neighbours, that share one copy of what is cut (HSDP); 0: all of them
    reduce_scatter_once  of ZeRO 3: gradients of micro-batches add up in whole buffers, summed over ranks once a step
    reshard_after_step   of ZeRO 3: parameters stay gathered from their first use to the end of the step
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    expert_tp: int = 1  # 1: each tensor rank routes its own tokens to whole experts; tp: experts are split too
    schedule: ScheduleName = "1f1b"
    cp_method: CpMethod = "all_gather"
    micro_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    zero: int = 0
    shard_group: int = 0
    reduce_scatter_once: bool = False
    reshard_after_step: bool = False
    recompute: tuple[str, ...] = ("enter",)
    recompute_every: int = 1
    recompute_first: int = 0
    recompute_else: tuple[str, ...] = ("enter",)
    offload: tuple[str, ...] = ()
    offload_every: int = 1
    offload_optimizer: bool = False
    attention: AttentionKernel = "reference"  # which kernel of the op: plain torch, or a fused kernel of a GPU
    loss: LossKernel = "reference"  # chunked: logits of some tokens at a time, all of it in backward
    loss_chunk: int = 0  # those tokens; 0: as many as a moderate block of logits has
    elementwise: Elementwise = "reference"  # norms, activations, loss, update, FP8 codes: plain torch, or GPU kernels
    experts: ExpertKernel = "reference"  # one product an expert, or one for all: of torch, or of package quack
    fuse: tuple[Fusion, ...] = ()  # ops that become one: `ops/fuse.py` says which
    bucket_bytes: int = 25 * 2**20  # of one flat gradient bucket; 0: one for each parameter

    @property
    def world(self) -> int:
        """Ranks of the whole layout: dp·tp·pp·cp."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def rows(self) -> int:
        """Places in (dp, cp) read as one number: those that share parameters."""
        return self.dp * self.cp

    @property
    def global_batch_size(self) -> int:
        """In sequences."""
        return self.dp * self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def stages(self) -> int:
        """Pipeline stages of the model: pp·vpp."""
        return self.pp * self.vpp

    @property
    def cuts_units(self) -> bool:
        """Whether more than what the optimizer keeps is cut, unit by unit."""
        return self.zero >= 2

    @property
    def split_backward(self) -> bool:
        """Whether gradients of inputs and of weights are made in actions of their own."""
        return schedule_of(self.schedule).split_backward

    @property
    def placement(self) -> Placement:
        """Which stages the model chunks of each pipeline rank are."""
        return schedule_of(self.schedule).placement(self.pp, self.vpp)

    @property
    def uniform(self) -> bool:
        """Whether one edit is that of all layers."""
        return self.recompute_every == 1 and not self.recompute_first and not (self.offload and self.offload_every > 1)

    def edit(self, place: int) -> Edit:
        """Of the layer at `place` in its stage, from 0; of what is no layer, at -1."""
        if place < 0:
            return Edit(self.recompute)
        if self.uniform:
            return Edit(self.recompute, self.offload)
        chosen = place % self.recompute_every == 0 and not 0 < self.recompute_first <= place
        leaves = place % self.offload_every == 0
        return Edit(self.recompute if chosen else self.recompute_else, self.offload if leaves else ())

    def like(self, place: int) -> int:
        """The first place of a stage whose layer has the same edit."""
        if self.uniform:
            return 0
        edit = self.edit(place)
        return next(i for i in range(place + 1) if self.edit(i) == edit)
