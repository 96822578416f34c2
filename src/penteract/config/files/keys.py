"""Every key of a run file: its type, its bounds, and what it means in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from penteract.config.files.sections import Batch, Kernels, MemorySection, Output, Parallel, TokenizerSection
from penteract.config.files.values import convert
from penteract.config.layout import MOST_TOKENS
from penteract.config.model import LatentSpec, ModelSpec, MoESpec, RopeScaling
from penteract.config.precision.policy import nearest_recipe
from penteract.config.run import Checkpoint, Data, LearningRateSchedule, Limits, Optimizer, Precision, Slurm, Training
from penteract.errors import BadInput
from penteract.units import printable

# Section names differ from the commands (train, plan, …), so that each name has one meaning.
SECTIONS: Mapping[str, type] = {
    "model": ModelSpec,
    "model.moe": MoESpec,
    "model.latent": LatentSpec,
    "model.rope_scaling": RopeScaling,
    "parallel": Parallel,
    "batch": Batch,
    "memory": MemorySection,
    "kernels": Kernels,
    "optimizer": Optimizer,
    "learning_rate": LearningRateSchedule,
    "data": Data,
    "tokenizer": TokenizerSection,
    "training": Training,
    "checkpoint": Checkpoint,
    "precision": Precision,
    "limits": Limits,
    "output": Output,
    "slurm": Slurm,
}

# Bounds exclude what no machine can do and what arithmetic cannot bear, not what is unwise. Nothing else states them.
_HUGE = 2**48
_WEEK = 7 * 24 * 3600  # seconds
_ROWS = 2**24
_LAYERS = 1024  # the deepest published decoder has 126
_RANKS = 2**20
_SEQUENCES = 2**20  # of a step
_TOKENS = MOST_TOKENS
_TINY = 1e-20  # fp32 and bf16 keep it apart from 0, so that nothing is divided by 0
_BELOW_1 = 1 - 1e-6  # a decay: nearer to 1, fp32 makes 1 of it, and its correction divides by 0

# key -> (what it means, least, most)
_ABOUT: Mapping[str, tuple[str, float, float]] = {
    "model.name": ("name of the run's folder", 0, 0),
    "model.layers": ("blocks", 1, _LAYERS),
    "model.hidden_size": ("D: the width of the residual stream", 1, _ROWS),
    "model.heads": ("H: query heads", 1, _ROWS),
    "model.kv_heads": ("K: key and value heads; they divide heads", 1, _ROWS),
    "model.head_size": ("C: the width of one head", 1, _ROWS),
    "model.ffn_size": ("F: the inner width of the MLP", 1, _ROWS),
    "model.vocab_size": ("V: rows of the embedding table", 1, _ROWS),
    "model.activation": ("activation function of the MLP", 0, 0),
    "model.norm": ("RMSNorm or LayerNorm", 0, 0),
    "model.norm_epsilon": ("number added to the variance", _TINY, 1),
    "model.positions": ("rotary, or a learned table", 0, 0),
    "model.rope_theta": ("base of the rotary wavelengths", 2, 1e15),
    "model.max_positions": ("rows of a learned table; with rope, only informative", 1, _HUGE),
    "model.sliding_window": ("tokens each token sees; 0: the whole document", 0, _HUGE),
    "model.qkv_bias": ("biases of the query, key and value projections", 0, 0),
    "model.output_bias": ("bias of attention's output projection", 0, 0),
    "model.mlp_bias": ("biases of the MLP", 0, 0),
    "model.qk_norm": ("normalise queries and keys per head", 0, 0),
    "model.tied": ("the head is the embedding table", 0, 0),
    "model.initial_std": ("standard deviation of the normal that weights are drawn from", 0, 100),
    "model.moe.experts": ("X: routed experts of a layer", 1, _ROWS),
    "model.moe.top_k": ("experts each token visits", 1, _ROWS),
    "model.moe.ffn_size": ("F of one expert", 1, _ROWS),
    "model.moe.shared_ffn_size": ("F of the MLP that every token visits; 0: none", 0, _ROWS),
    "model.moe.every": ("layer i has experts when (i + 1) % every == 0", 1, _LAYERS),
    "model.moe.dense_layers": ("layers without experts, whatever `every` says", 0, _LAYERS),
    "model.moe.score": ("how the router's logits become weights", 0, 0),
    "model.moe.normalize_weights": ("the top_k weights sum to one", 0, 0),
    "model.moe.balance": ("what keeps experts evenly used", 0, 0),
    "model.moe.balance_coefficient": ("coefficient of the balance loss", 0, 100),
    "model.moe.bias_rate": ("a step of the balancing bias", 0, 100),
    "model.mtp_layers": ("depths of multi-token prediction, a block each", 0, 16),
    "model.mtp_loss_coefficient": ("coefficient of the mean of their losses", 0, 100),
    "model.z_loss_coefficient": ("coefficient of the square of each token's log-sum-exp of logits; 0: none", 0, 100),
    "model.moe.weight_scale": ("factor of the chosen weights, once they are normalised", 0, 1e6),
    "model.moe.groups": ("groups that experts form", 1, _ROWS),
    "model.moe.top_groups": ("groups among which a token chooses", 1, _ROWS),
    "model.moe.group_score": ("what makes a group good: its best expert, or its best two together", 0, 0),
    "model.latent.kv_rank": ("width of the latent of keys and values", 1, _ROWS),
    "model.latent.plain_size": ("width of a query and key head, without positions", 1, _ROWS),
    "model.latent.rope_size": ("width of a query head's rotated part; all heads share its key", 1, _ROWS),
    "model.latent.value_size": ("width of a value head", 1, _ROWS),
    "model.latent.query_rank": ("width of the queries' latent; 0: none", 0, _ROWS),
    "model.rope_scaling.kind": ("which wavelengths are stretched", 0, 0),
    "model.rope_scaling.fast_rotations": ("yarn: faster dims keep their wavelength", 1e-6, 1e6),
    "model.rope_scaling.slow_rotations": ("yarn: wavelengths of slower dims are divided by factor", 1e-6, 1e6),
    "model.rope_scaling.attention_factor": ("factor of cosines and sines", 1e-6, 1e6),
    "model.rope_scaling.softmax_factor": ("factor of the scale of attention's scores", 1e-6, 1e6),
    "model.rope_scaling.factor": ("long wavelengths are divided by this", 1, 1e6),
    "model.rope_scaling.low_frequency_factor": ("where the smooth band ends", 1e-6, 1e6),
    "model.rope_scaling.high_frequency_factor": ("where the smooth band begins", 1e-6, 1e6),
    "model.rope_scaling.original_positions": ("positions seen before scaling", 1, _HUGE),
    "parallel.dp": ("data: replicas of the model", 1, _RANKS),
    "parallel.tp": ("tensor: ranks that share every matrix", 1, _RANKS),
    "parallel.pp": ("pipeline: ranks that share the layers", 1, _RANKS),
    "parallel.cp": ("context: ranks that share every sequence", 1, _RANKS),
    "parallel.ep": ("expert: ranks that share the experts; divides dp·cp", 1, _RANKS),
    "parallel.vpp": ("model chunks of a pipeline rank", 1, _LAYERS),
    "parallel.last_stage_less_layers": ("layers that the last stage has fewer, for its head", 0, _LAYERS),
    "parallel.expert_tp": ("1: experts stay whole; tp: each is split over tp", 1, _RANKS),
    "parallel.schedule": ("order of the pipeline's forwards and backwards", 0, 0),
    "parallel.cp_method": ("how attention gets other ranks' keys and values", 0, 0),
    "parallel.ep_method": ("how tokens get to other ranks' experts; auto: by what sends less", 0, 0),
    "parallel.expert_rows": ("memory of experts' rows: exact, which the host reads; padded, with room for more", 0, 0),
    "parallel.capacity_percent": (
        "padded rows by all-to-all: room of what a rank sends another, in percent of even routing",
        100,
        102_400,
    ),
    "parallel.zero": ("what data ranks shard: 1 optimizer states, 2 gradients too, 3 parameters too", 0, 3),
    "parallel.shard_group": ("ranks of dp·cp that share one copy of what ZeRO shards (HSDP); 0: all", 0, _RANKS),
    "parallel.reduce_scatter_once": ("ZeRO 3: gradients accumulate unsharded, and are reduced once a step", 0, 0),
    "parallel.reshard_after_step": ("ZeRO 3: parameters stay gathered until the step ends", 0, 0),
    "batch.sequence_length": ("tokens", 1, _TOKENS),
    "batch.micro_batch_size": ("sequences a replica takes at a time; auto: as many as fit evenly", 1, _SEQUENCES),
    "batch.global_batch_size": ("sequences a step", 1, _SEQUENCES),
    "batch.global_batch_tokens": ('tokens a step, instead: 65536, "1M" (10^6), "1Mi" (2^20)', 1, _SEQUENCES * _TOKENS),
    "memory.recompute": ('"none", "full", "budget", or ops recomputed in backward: ["tp_all_gather", "swiglu"]', 0, 0),
    "memory.budget": (
        'bound of "budget": fraction of the activations of "none" that may be kept; 0: see budget_gib',
        0,
        1,
    ),
    "memory.budget_gib": ('bound of "budget", instead: GiB that all tensors of a rank may take', 0, 1e6),
    "memory.chosen": ('ops that "budget" chose; written by a run, and chosen again at each start', 0, 0),
    "memory.recompute_every": (
        "layers that recompute: 1 every one; n every n-th of a stage, from its first on",
        1,
        _LAYERS,
    ),
    "memory.recompute_first": ("number of layers of a stage that recompute, from its first on; 0: all", 0, _LAYERS),
    "memory.recompute_else": ("ops recomputed in the layers that recompute_every and recompute_first leave out", 0, 0),
    "memory.offload": ('"none", or what is kept on the host: ["layer_inputs"] (the inputs of layers), ops, "*"', 0, 0),
    "memory.offload_every": (
        "layers that offload: 1 every one; n every n-th of a stage, from its first on",
        1,
        _LAYERS,
    ),
    "memory.offload_optimizer": ("optimizer states are on the host, and copied to the device for the update", 0, 0),
    "memory.bucket_bytes": (
        "bytes with which a gradient bucket ends where a layer does; 40 times as many end it within one, but under "
        "ZeRO 3; 0: one for each parameter",
        0,
        2**40,
    ),
    "kernels.attention": (
        "kernel on a GPU in 16 bits: flash, cudnn (whole sequences), fa4 or fa4_documents (penteract[gpu])",
        0,
        0,
    ),
    "kernels.loss": ("kernel of the loss; chunked computes the logits of some tokens at a time", 0, 0),
    "kernels.loss_chunk": ("tokens of a chunk; 0: as many as make 2^28 logits, 8,192 with triton", 0, _TOKENS),
    "kernels.elementwise": ("triton: one GPU kernel for each norm, activation, loss, update, quantisation", 0, 0),
    "kernels.determinism": (
        "bitwise: the same bits whenever a run is repeated, by kernels that were seen to; off: the fastest kernels",
        0,
        0,
    ),
    "kernels.experts": (
        "kernel of experts' products: grouped (torch) or quack, all at once; or one after the other",
        0,
        0,
    ),
    "kernels.collectives": (
        "of tp and cp inside a host: library (NCCL, gloo), direct: ranks read each other's registers, or overlapped: "
        "products of tp beside these",
        0,
        0,
    ),
    "kernels.fuse": ('ops that become one: "none", "all", or some of norm, add, mlp, qkv, loss, fp8, glu', 0, 0),
    "optimizer.kind": ("optimizer of matrices between hidden states; AdamW updates the rest", 0, 0),
    "optimizer.learning_rate": ("peak of the learning rate", 0, 1e3),
    "optimizer.betas": ("decay of AdamW's two moments", 0, _BELOW_1),
    "optimizer.epsilon": ("number added to the root of the second moment", _TINY, 1),
    "optimizer.weight_decay": ("decay of matrices, not of norms and biases", 0, 1e3),
    "optimizer.clip_norm": ("largest norm of the gradient; 0: never clipped", 0, 1e9),
    "optimizer.muon_momentum": ("decay of Muon's momentum", 0, _BELOW_1),
    "optimizer.muon_nesterov": ("Nesterov momentum in Muon", 0, 0),
    "optimizer.newton_schulz_steps": ("iterations of Muon to make a matrix orthogonal", 1, 100),
    "learning_rate.kind": ("curve after the warmup", 0, 0),
    "learning_rate.warmup_steps": ("steps from zero to the peak", 0, _HUGE),
    "learning_rate.final_fraction": ("fraction of the peak at the end of the decay", 0, 1),
    "learning_rate.decay_fraction": ("fraction of the steps until decay_end that decay, for wsd", 0, 1),
    "learning_rate.decay_end": ("step at which the decay ends, and the rate stays; 0: training.steps", 0, _HUGE),
    "data.source": ('"builtin", a file, a folder, a list of them, or "hf:NAME"', 0, 0),
    "data.revision": ("commit, branch or tag of hf:NAME; auto: the newest at the first start, which a run keeps", 0, 0),
    "data.validation_fraction": ("fraction of the documents that is never trained on", 0, 0.9),
    "data.allow_change": ("whether a resumed run may go on with other data", 0, 0),
    "data.pack_documents": ("several documents share a sequence; attention stays inside each", 0, 0),
    "tokenizer.source": ('"bytes", or the path of a tokenizer.json', 0, 0),
    "training.steps": ("optimizer steps", 1, _HUGE),
    "training.seed": ("seed of weights and of the order of data", 0, _HUGE),
    "training.validation_every": ("steps between validations; 0: never", 0, _HUGE),
    "training.validation_batches": ("global batches of each validation", 1, 10**6),
    "training.replica_check_every": ("steps between comparisons of replicas; 0: only before checkpoints", 0, _HUGE),
    "training.log_level": ("least level of what is printed", 0, 0),
    "training.sample_tokens": ("tokens that the model writes at the end; 0: none", 0, 10**6),
    "checkpoint.every": ("steps between checkpoints; 0: only at the end", 0, _HUGE),
    "checkpoint.keep": ("newest checkpoints that stay; 0: all", 0, _HUGE),
    "checkpoint.folder": ('"inside" the run, or a folder for its checkpoints alone, on any disk', 0, 0),
    "checkpoint.asynchronous": ("train on while a checkpoint is written, from a copy in host memory", 0, 0),
    "precision.dtype": ("a recipe: the dtypes of compute, gradients and optimizer", 0, 0),
    "precision.device": ("device of the ranks; auto: CUDA when there is one", 0, 0),
    "precision.gradient": ("dtype in which gradients accumulate; auto: as in the recipe", 0, 0),
    "precision.reduce": ("dtype in which gradients are reduced over ranks; auto: as they accumulate", 0, 0),
    "precision.master": ("fp32_split: the bf16 parameter and its other 16 bits; none: parameters are updated", 0, 0),
    "precision.moments": ("dtype of the optimizer's moments; int8: quantised, with a scale for each 256", 0, 0),
    "precision.loss_scale": ("loss scale of the first step, in fp16; it adapts", 0, 2.0**60),
    "precision.loss_scale_growth_every": ("steps without overflow after which it doubles", 0, _HUGE),
    "precision.fp8_bf16_layers": (
        "numbers of first and last layers that are not in FP8; the head never is",
        0,
        _LAYERS,
    ),
    "precision.fp8_gradient": ("format of gradients in FP8", 0, 0),
    "precision.fp8_round_scales": ("whether scales are powers of two", 0, 0),
    "precision.fp8_history": ("steps whose largest values decide scales, in fp8_delayed", 1, 10_000),
    "precision.fp8_block": ("elements that share a scale, in fp8_blockwise; GPU kernels need 128", 16, 2**16),
    "precision.fp8_gather": ("whether ZeRO 3 gathers weights in FP8, half the bytes, in fp8_tensorwise", 0, 0),
    "precision.fp8_experts": ("whether experts' matrices are in FP8 too, in fp8_rowwise and fp8_blockwise", 0, 0),
    "precision.fp8_fast_accumulation": (
        "whether a GPU keeps sums of gradients in fewer bits, as it does forward",
        0,
        0,
    ),
    "precision.modules": ('exceptions by parameter name, the last match decides: ["embedding*:moments=fp32"]', 0, 0),
    "limits.join": ("seconds that ranks wait until all are there", 1, _WEEK),
    "limits.data": ("seconds that ranks wait while rank 0 prepares the data", 1, _WEEK),
    "limits.compile": ("seconds without progress from the data to the end of the first step", 1, _WEEK),
    "limits.load": ("seconds in which a rank loads its part of a checkpoint", 1, _WEEK),
    "limits.step": ("seconds without progress in a step; any action or collective is progress", 1, _WEEK),
    "limits.validate": ("seconds without progress in a validation", 1, _WEEK),
    "limits.save": ("seconds in which a rank saves its part of a checkpoint", 1, _WEEK),
    "output.folder": ("the folder for run folders", 0, 0),
    "output.trackers": ('what shows the metrics too: "none", or some of tensorboard, wandb, trackio', 0, 0),
    "slurm.ranks_per_node": ("ranks of a node: its GPUs", 1, 1024),
    "slurm.nodes": ("nodes of a job; auto: as many as the layout's ranks need", 1, _RANKS),
    "slurm.partition": ("auto: the cluster's default; so for account, qos and time", 0, 0),
    "slurm.account": ("who pays", 0, 0),
    "slurm.qos": ("quality of service", 0, 0),
    "slurm.time": ("limit of a job, as 2-12:00:00 or 04:00:00", 0, 0),
    "slurm.gpus": ("how GPUs are asked for: --gpus-per-node, --gres=gpu, or not at all", 0, 0),
    "slurm.gpu_type": ("such as h100; auto: any", 0, 0),
    "slurm.exclusive": ("whether a job has its nodes to itself", 0, 0),
    "slurm.cpus_per_rank": ("cores of a rank; 0: what the node gives", 0, 4096),
    "slurm.memory": ("of a node, as 512G; auto: the cluster's default", 0, 0),
    "slurm.grace": ("seconds before the limit, and after a preemption, in which a run saves", 10, _WEEK),
    "slurm.retries": ("starts after a lost peer without a checkpoint in between; preemptions do not count", 0, 1000),
    "slurm.container": ("image in which ranks run", 0, 0),
    "slurm.container_runtime": ("what runs it", 0, 0),
    "slurm.container_mounts": ('["/data:/data"]; the working folder and the run\'s are there in any case', 0, 0),
    "slurm.python": ("command that starts Python; auto: the one that submits, python3 in a container", 0, 0),
    "slurm.setup": ('lines of shell before the ranks start: ["module load cuda"]', 0, 0),
    "slurm.options": ('more options of sbatch: ["--constraint=ib"]', 0, 0),
    "slurm.usd_per_gpu_hour": ("price, for --dry-run; 0: not known", 0, 1e6),
}

# Names in other trainers, with or without a section -> our keys, to suggest the right key for an unknown one.
ELSEWHERE: Mapping[str, str] = {
    "parallel.data": "parallel.dp", "parallel.tensor": "parallel.tp", "parallel.pipeline": "parallel.pp",
    "parallel.context": "parallel.cp", "parallel.expert": "parallel.ep", "data_parallel": "parallel.dp",
    "tensor_parallel": "parallel.tp", "pipeline_parallel": "parallel.pp", "context_parallel": "parallel.cp",
    "expert_parallel": "parallel.ep", "sequence_parallel": "parallel.tp",
    "data_parallel_size": "parallel.dp", "dp_size": "parallel.dp", "data_parallel_replicate_degree": "parallel.dp",
    "tensor_model_parallel_size": "parallel.tp", "tensor_parallel_degree": "parallel.tp", "tp_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp", "pipeline_parallel_degree": "parallel.pp",
    "pp_size": "parallel.pp", "pp_engine": "parallel.schedule",
    "context_parallel_size": "parallel.cp", "context_parallel_degree": "parallel.cp", "cp_size": "parallel.cp",
    "expert_model_parallel_size": "parallel.ep", "expert_parallel_size": "parallel.ep",
    "expert_parallel_degree": "parallel.ep", "virtual_pipeline_model_parallel_size": "parallel.vpp",
    "zero_stage": "parallel.zero", "use_distributed_optimizer": "parallel.zero",
    "data_parallel_shard_degree": "parallel.shard_group",
    "seq_len": "batch.sequence_length", "seq_length": "batch.sequence_length", "max_length": "batch.sequence_length",
    "mbs": "batch.micro_batch_size", "per_device_train_batch_size": "batch.micro_batch_size",
    "gradient_accumulation_steps": "batch.global_batch_size", "batch_size": "batch.global_batch_size",
    "train_iters": "training.steps", "train_steps": "training.steps", "max_steps": "training.steps",
    "total_train_steps": "training.steps", "lr": "optimizer.learning_rate",
    "lr_decay_iters": "learning_rate.decay_end", "lr_decay_steps": "learning_rate.decay_end",
    "lr_warmup_iters": "learning_rate.warmup_steps", "lr_warmup_steps": "learning_rate.warmup_steps",
    "lr_decay_style": "learning_rate.kind",
    "recompute_num_layers": "memory.recompute_first", "selective_ac_option": "memory.recompute_every",
    "activation_memory_budget": "memory.budget", "memory_budget": "memory.budget",
    "offload_activations": "memory.offload", "cpu_offloading": "memory.offload",
    "activation_offloading": "memory.offload", "offload_optimizer": "memory.offload_optimizer",
    "optimizer_cpu_offload": "memory.offload_optimizer", "recompute_modules": "memory.recompute",
    "recompute_granularity": "memory.recompute", "gradient_checkpointing": "memory.recompute",
    "num_hidden_layers": "model.layers", "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads", "intermediate_size": "model.ffn_size", "head_dim": "model.head_size",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key. `required`: the dataclass of its section has no default for it."""

    name: str
    hint: Any  # the annotation, resolved
    default: Any
    required: bool
    about: str
    least: float
    most: float

    @property
    def forms(self) -> frozenset[type]:
        """Which of `str` (free text) and `tuple` (a list) its values can be."""
        parts = get_args(self.hint) if get_origin(self.hint) in (Union, UnionType) else (self.hint,)
        return frozenset(kind for kind in (str, tuple) if kind in (*parts, *map(get_origin, parts)))

    def check(self, value: object, origin: str) -> Any:
        """`value` as this key's type. Raises BadInput with the value found, those allowed, and its origin."""
        try:
            return convert(value, self.hint, f"{self.name} ({origin})", bounds=(self.least, self.most))
        except BadInput as bad:
            if near := self._nearest(value):
                leaf = self.name.rpartition(".")[2]
                bad.fix = f"--{self.name} {near}" if origin.startswith("--") else f'{leaf} = "{near}"'
            raise

    def _nearest(self, value: object) -> str:
        """The choice that a text probably means; "" where it is like none."""
        kinds = get_args(self.hint) if get_origin(self.hint) in (Union, UnionType) else (self.hint,)
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        if not choices or not isinstance(value, str):
            return ""
        if self.name == "precision.dtype":
            return nearest_recipe(value)
        return next(iter(get_close_matches(value.lower(), choices, 1, cutoff=0.6)), "")


@cache
def keys() -> Mapping[str, Key]:
    """Every key by its dotted name, in run file order."""
    found: dict[str, Key] = {}
    for section, kind in SECTIONS.items():
        hints = get_type_hints(kind)
        for f in fields(kind):
            name = f"{section}.{f.name}"
            if name not in SECTIONS:
                about, least, most = _ABOUT[name]
                required = f.default is MISSING and f.default_factory is MISSING
                found[name] = Key(
                    name=name, hint=hints[f.name], default=None if required else f.default, required=required,
                    about=about, least=least, most=most,
                )  # fmt: skip
    return found


def nearest_key(name: str) -> str:
    """The key that `name` probably means, or an empty string."""
    section, _, leaf = name.rpartition(".")
    for found in (name, leaf):
        if found in ELSEWHERE:
            return ELSEWHERE[found]
    every = list(keys())
    by_leaf = {k.rsplit(".", 1)[-1]: k for k in reversed(every)}
    in_section = {k.rsplit(".", 1)[-1]: k for k in every if k.rpartition(".")[0] == section}
    if near := get_close_matches(leaf, in_section, n=1, cutoff=0.85):  # a slip, such as training.step
        return in_section[near[0]]
    if leaf in by_leaf and name not in by_leaf.values():
        return by_leaf[leaf]
    for leaves in (in_section, by_leaf):
        if near := get_close_matches(leaf, leaves, n=1, cutoff=0.6):
            return leaves[near[0]]
    return ""


def find_key(name: str, origin: str) -> Key:
    """The key called `name`. Raises BadInput with the nearest one if there is none."""
    key = keys().get(name)
    if key is None:
        near = nearest_key(name)
        fix = f"did you mean {near}?" if near else "remove it; `penteract init` writes every key"
        allowed = "" if near else f"sections {', '.join(SECTIONS)}"
        raise BadInput("KEY", "unknown key", where=origin, found=show_key(name), allowed=allowed, fix=fix)
    return key


def show_key(name: str) -> str:
    """A key for a message: printable, and at most 80 characters."""
    return printable(name, 80)
