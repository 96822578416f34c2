"""HOW it is laid out: the five degrees of parallelism and related choices, as a frozen value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

from penteract.schedule.registry import ScheduleName, schedule_of
from penteract.schedule.schedule import Placement

CpMethod = Literal["all_gather", "ring", "ulysses"]
EpMethod = Literal["all_to_all", "all_gather"]
ExpertRows = Literal["exact", "padded"]
# Those of a package of its own before those of torch, and in each the fastest last.
AttentionKernel = Literal["reference", "fa4_documents", "fa4", "flash", "cudnn"]
LossKernel = Literal["reference", "chunked"]
Elementwise = Literal["reference", "triton"]
ExpertKernel = Literal["reference", "grouped", "quack"]
Collectives = Literal["library", "direct", "overlapped"]
Determinism = Literal["off", "bitwise"]
Fusion = Literal["norm", "add", "mlp", "qkv", "loss", "fp8", "glu"]

# A step is a list of micro-batches and their chunks of the loss: a rank makes it before it starts, and walks it.
MOST_MICRO_BATCHES = 2**14  # of a rank's step
MOST_TOKENS = 2**24  # of a micro-batch
MOST_LOSS_CHUNKS = 2**13  # of a micro-batch, where the layout sets their tokens

ZERO_STAGES = (0, 1, 2, 3)
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = get_args(AttentionKernel)
LOSS_KERNELS: tuple[LossKernel, ...] = get_args(LossKernel)
ELEMENTWISE: tuple[Elementwise, ...] = get_args(Elementwise)
EXPERT_KERNELS: tuple[ExpertKernel, ...] = get_args(ExpertKernel)
COLLECTIVES: tuple[Collectives, ...] = get_args(Collectives)
DETERMINISM: tuple[Determinism, ...] = get_args(Determinism)
EVERY_FUSION: tuple[Fusion, ...] = get_args(Fusion)
FUSIONS: tuple[Fusion, ...] = ("norm", "add", "mlp", "qkv", "loss", "fp8")  # "all": those that need no package
CP_METHODS: tuple[CpMethod, ...] = get_args(CpMethod)
EP_METHODS: tuple[EpMethod, ...] = get_args(EpMethod)
EXPERT_ROWS: tuple[ExpertRows, ...] = get_args(ExpertRows)


class Edit(NamedTuple):
    """The ops of a layer whose results are recomputed in backward, and those whose results are offloaded to the
    host."""

    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()


PLAIN = Edit()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to split a training step over `world` ranks.

    dp·tp·pp·cp = world; `ep` divides dp·cp. `vpp` is the number of model chunks of a pipeline rank. Layers are shared
    evenly by stages, as if the last had `last_stage_less_layers` more than it has: it has the head.
    `recompute` names the ops whose results are dropped after forward and recomputed in backward: in every
    `recompute_every`-th layer of a stage, from its first on, or only in its first `recompute_first` layers (0: no
    limit). Other layers recompute the ops of `recompute_else`.
    `offload` names what is kept on the host, in every `offload_every`-th layer of a stage: "layer_inputs" are the
    inputs of layers, which full recomputation keeps; "*" is all that is kept.
    With `offload_optimizer` the optimizer states of this rank's shards are on the host too.

    zero                 what is sharded over the ranks that hold the same parameters: 1 optimizer states, 2 gradients
                         too, 3 parameters too, which are then gathered for each use
    shard_group          the number of neighbouring ranks of dp·cp that share one copy (HSDP); 0: all of them
    reduce_scatter_once  with ZeRO 3: gradients of micro-batches accumulate unsharded, and are reduced once a step
    reshard_after_step   with ZeRO 3: parameters stay gathered from their first use to the end of the step
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1  # 1: each tensor rank routes its own tokens to whole experts; tp: experts are sharded over tp
    schedule: ScheduleName = "1f1b"
    vpp: int = 1
    last_stage_less_layers: int = 0
    cp_method: CpMethod = "all_gather"
    ep_method: EpMethod = "all_to_all"  # each copy of a token to its expert, or each token to all ranks
    # Registers of the rows that come to a rank's experts: of their exact number, which the host reads in each layer; or
    # padded, and the host reads nothing: to the most that can come, or, by all-to-all, to blocks of a fixed size.
    expert_rows: ExpertRows = "exact"
    capacity_percent: int = 150  # rows of such a block, in percent of those that even routing sends
    micro_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    zero: int = 0
    shard_group: int = 0
    reduce_scatter_once: bool = False
    reshard_after_step: bool = False
    recompute: tuple[str, ...] = ("tp_all_gather",)
    recompute_every: int = 1
    recompute_first: int = 0
    recompute_else: tuple[str, ...] = ("tp_all_gather",)
    offload: tuple[str, ...] = ()
    offload_every: int = 1
    offload_optimizer: bool = False
    attention: AttentionKernel = "reference"  # plain torch, or a fused GPU kernel
    loss: LossKernel = "reference"  # chunked: logits of some tokens at a time, all of it in backward
    loss_chunk: int = 0  # tokens of a chunk; 0: as many as make a moderate block of logits
    elementwise: Elementwise = "reference"  # norms, activations, loss, update, quantisation: plain torch, or Triton
    fuse: tuple[Fusion, ...] = ()  # ops that become one, see `ops/fuse.py`
    experts: ExpertKernel = "reference"  # a product for each expert, or one for all, of torch or of the package quack
    # Of tp and cp inside a host: calls of NCCL or gloo; or ranks read each other's registers (`parallel/direct.py`);
    # or they do so beside products of tp in two parts (`ops/overlap/in_parts.py`).
    collectives: Collectives = "library"
    # Whether a run has the same bits whenever its layout is repeated; else kernels sum in the order that is fastest.
    determinism: Determinism = "off"
    bucket_bytes: int = 25 * 2**20  # with which a gradient bucket ends where a layer does; 0: one for each parameter

    @staticmethod
    def of(fields: Mapping[str, Any], **others: Any) -> Layout:
        """`Layout(**fields, **others)` in a tenth of the time: a search makes a hundred thousand."""
        made = object.__new__(Layout)
        made.__dict__.update(fields)
        made.__dict__.update(others)
        return made

    def put(self, **changes: Any) -> Layout:
        """`dataclasses.replace` in a tenth of the time."""
        return Layout.of(self.__dict__, **changes)

    @property
    def reads_directly(self) -> bool:
        """Whether ranks of a host read each other's registers."""
        return self.collectives != "library"

    @property
    def world(self) -> int:
        """Ranks of the whole layout: dp·tp·pp·cp."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def rows(self) -> int:
        """dp·cp: the ranks that share parameters."""
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
    def gathers_tokens(self) -> bool:
        """Whether ranks that share experts gather each other's tokens, and add up what their experts make of them."""
        return self.ep > 1 and self.ep_method == "all_gather"

    @property
    def pads_rows(self) -> bool:
        """Whether registers of rows of experts have a fixed size, with room for more than come."""
        return self.expert_rows == "padded" and self.ep > 1

    @property
    def sends_blocks(self) -> bool:
        """Whether all-to-alls of experts send blocks of a fixed size. A step whose copies of tokens do not fit them is
        repeated with exact sizes."""
        return self.pads_rows and not self.gathers_tokens

    @property
    def cuts_units(self) -> bool:
        """Whether gradients (or parameters too) are sharded, by FSDP unit: ZeRO 2 and 3."""
        return self.zero >= 2

    @property
    def adds_gradients(self) -> bool:
        """Whether weight gradients of some micro-batch are added to those of others."""
        return self.gradient_accumulation_steps > 1

    @property
    def updates_whole(self) -> bool:
        """Whether a rank updates all of each parameter that it holds."""
        return not self.zero or self.world == 1

    @property
    def split_backward(self) -> bool:
        """Whether input and weight gradients are separate actions."""
        return schedule_of(self.schedule).split_backward

    @property
    def placement(self) -> Placement:
        """The stages of each pipeline rank's model chunks."""
        return _placement(self.schedule, self.pp, self.vpp)

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same edit."""
        return self.recompute_every == 1 and not self.recompute_first and not (self.offload and self.offload_every > 1)

    def edit(self, place: int) -> Edit:
        """The edit of the layer at `place` in its stage, from 0; at -1, of everything outside the layers."""
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


@cache  # a search asks very often
def _placement(schedule: ScheduleName, pp: int, vpp: int) -> Placement:
    return schedule_of(schedule).placement(pp, vpp)


def named_fusions(names: Iterable[Any]) -> list[Any]:
    """Each once, with those that "all" stands for."""
    return list(dict.fromkeys(name for given in names for name in (FUSIONS if given == "all" else (given,))))
