"""One training run as a frozen value: model, layout, data, optimizer, precision, duration."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.optimizers import PLAIN, OptimizerKind, OptimizerKinds, OptimizerName
from penteract.config.precision.fp8 import Fp8
from penteract.config.precision.module_patterns import Pattern
from penteract.config.precision.policy import RECIPES, Policy
from penteract.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """AdamW (1711.05101), or Muon for matrices between hidden states and AdamW for the rest (2502.16982), with the same
    rate and decay. The gradient's global norm is clipped before the update."""

    kind: OptimizerName = "adamw"
    learning_rate: float = 1e-3  # the peak
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1  # of matrices, not of norms and biases
    clip_norm: float = 1.0  # 0: never clipped
    muon_momentum: float = 0.95
    muon_nesterov: bool = True
    newton_schulz_steps: int = 5  # enough to bring singular values near one

    @property
    def optimizer_kinds(self) -> OptimizerKinds:
        """Which optimizer updates which parameters."""
        return (
            OptimizerKinds(matrices=OptimizerKind("muon", self.newton_schulz_steps)) if self.kind == "muon" else PLAIN
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateSchedule:
    """The rate over the steps, as a fraction of the peak: a linear warmup, then `kind`.

    "cosine" and "linear" fall to `final_fraction` at the end of the decay; "wsd" (2404.06395) stays at the
    peak and falls during the last `decay_fraction` of the steps until there. The rate stays there after it.
    """

    kind: Literal["cosine", "wsd", "linear"] = "cosine"
    warmup_steps: int = 0
    final_fraction: float = 0.1
    decay_fraction: float = 0.2
    decay_end: int = 0  # a step; 0: the last of the run

    def end(self, steps: int) -> int:
        """The step at which the decay of a run of `steps` ends."""
        return self.decay_end or steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Where the text comes from.

    `source`: "builtin" (a small text that travels with the program), one or more files or folders,
    or "hf:NAME" (a data set of the Hugging Face hub).
    """

    source: str | tuple[str, ...] = "builtin"
    revision: str = "auto"  # of "hf:NAME": a commit, a branch or a tag; auto: the newest. A run keeps the commit
    validation_fraction: float = 0.05
    allow_change: bool = False  # whether a resumed run may go on with other data
    pack_documents: bool = True  # several documents share a sequence, and attention stays inside each


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Duration, validation and logging."""

    steps: int = 1000
    seed: int = 0
    validation_every: int = 100  # steps; 0: never
    validation_batches: int = 8  # global batches each time
    replica_check_every: int = 100  # steps; 0: only before checkpoints
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    sample_tokens: int = 0  # written by the model at the end; 0: none


TrackerName = Literal["tensorboard", "wandb", "trackio"]  # the package that it needs, and the extra that installs it


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """When and where checkpoints are saved, and how many are kept."""

    every: int = 0  # steps; 0: only at the end
    keep: int = 2  # the newest; 0: all
    folder: str = "inside"  # of this run alone; "inside": in the run's folder
    asynchronous: bool = True  # whether training goes on while one is written


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Seconds that a rank may spend without any progress, in each phase of a run, before the run ends with an error
    that names it. Each action and each collective is progress, so a phase may take longer."""

    join: int = 600  # until all ranks are there
    data: int = 3600  # while rank 0 prepares the data
    compile: int = 1800  # from the data to the end of the first step: connections, weights, kernels
    load: int = 3600  # a rank's part of a checkpoint
    step: int = 300  # with reading its batch
    validate: int = 600
    save: int = 1800  # a rank's part of a checkpoint

    def of(self, phase: str) -> float:
        """The limit of a phase. In that of `data`, the ranks that wait for rank 0 speak first."""
        return self.data + 1.0 if phase == "data" else float(getattr(self, phase, self.step))

    @property
    def collective(self) -> float:
        """Seconds after which torch ends a collective: later than all limits, so that these speak first."""
        return 60.0 + max(self.join, self.data, self.compile, self.load, self.step, self.validate, self.save)


_FP8 = (
    "fp8_bf16_layers", "fp8_gradient", "fp8_round_scales", "fp8_history", "fp8_block", "fp8_gather", "fp8_experts",
    "fp8_fast_accumulation",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """A recipe by name, and changes to it; "auto": as in the recipe."""

    dtype: Literal[
        "fp32", "bf16", "bf16_pure", "fp16", "fp64", "fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_blockwise"
    ] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gradient: Literal["auto", "fp64", "fp32", "bf16"] = "auto"
    reduce: Literal["auto", "fp64", "fp32", "bf16"] = "auto"
    master: Literal["auto", "none", "fp32", "fp32_split"] = "auto"
    moments: Literal["auto", "fp64", "fp32", "bf16", "int8"] = "auto"
    loss_scale: float | Literal["auto"] = "auto"
    loss_scale_growth_every: int | Literal["auto"] = "auto"
    fp8_bf16_layers: tuple[int, int] | Literal["auto", "none"] = "auto"  # first and last
    fp8_gradient: Literal["auto", "none", "e4m3", "e5m2"] = "auto"
    fp8_round_scales: bool | Literal["auto", "none"] = "auto"
    fp8_history: int | Literal["auto", "none"] = "auto"
    fp8_block: int | Literal["auto", "none"] = "auto"
    fp8_gather: bool | Literal["auto", "none"] = "auto"
    fp8_experts: bool | Literal["auto", "none"] = "auto"
    fp8_fast_accumulation: bool | Literal["auto", "none"] = "auto"
    modules: tuple[str, ...] | Literal["auto", "none"] = "auto"

    @staticmethod
    def of(policy: Policy) -> Precision:
        """The section that gives `policy`, without any "auto". Raises BadInput if no recipe has its FP8."""
        fp8, bare = policy.fp8, policy.compute == "bf16" and not policy.master
        if fp8 and policy.compute != "bf16":
            raise BadInput("PRECISION", "recipes of FP8 compute in bf16", where="precision.dtype", found=policy.compute,
                           allowed="bf16", fix=f"--precision.dtype fp8_{fp8.kind}")  # fmt: skip
        dtype = f"fp8_{fp8.kind}" if fp8 else "bf16_pure" if bare else policy.compute
        values: Any = {
            "dtype": dtype, "gradient": policy.gradient, "reduce": policy.reduce, "master": policy.master or "none",
            "moments": policy.moments, "loss_scale": policy.loss_scale, "loss_scale_growth_every": policy.growth_every,
        }  # fmt: skip
        values |= dict.fromkeys(_FP8, "none") | {"modules": tuple(map(str, policy.modules)) or "none"}
        if fp8 is not None:
            values |= {
                "fp8_bf16_layers": (fp8.first, fp8.last), "fp8_gradient": fp8.gradient, "fp8_round_scales": fp8.powers,
                "fp8_history": fp8.history, "fp8_block": fp8.block, "fp8_gather": fp8.gather,
                "fp8_experts": fp8.experts, "fp8_fast_accumulation": fp8.fast_accumulation,
            }  # fmt: skip
        return Precision(**values)

    @property
    def changes(self) -> Precision:
        """The same with "auto" for all that equals the recipe, so that another recipe can decide it."""
        usual = Precision.of(RECIPES[self.dtype])
        own: Any = {name: "auto" for name in PARTS if getattr(self, name) == getattr(usual, name)}
        return replace(self, **own)

    @property
    def policy(self) -> Policy:
        """The policy of this section. Raises BadInput if its parts do not go together."""
        recipe = RECIPES[self.dtype]
        values = {
            "gradient": self.gradient, "reduce": self.reduce, "master": self.master, "moments": self.moments,
            "loss_scale": self.loss_scale, "growth_every": self.loss_scale_growth_every,
        }  # fmt: skip
        changes: dict[str, Any] = {k: "" if v == "none" else v for k, v in values.items() if v != "auto"}
        if self.gradient != "auto" and self.reduce == "auto":
            changes["reduce"] = self.gradient
        bare = not changes.get("master", recipe.master)
        stochastic = bare and recipe.parameter == "bf16"
        modules = () if isinstance(self.modules, str) else tuple(map(Pattern.of, self.modules))
        return replace(recipe, **changes, stochastic=stochastic, fp8=self._fp8(recipe.fp8), modules=modules)

    def _fp8(self, recipe: Fp8 | None) -> Fp8 | None:
        values = {
            "layers": self.fp8_bf16_layers, "gradient": self.fp8_gradient, "powers": self.fp8_round_scales,
            "history": self.fp8_history, "block": self.fp8_block, "gather": self.fp8_gather,
            "experts": self.fp8_experts, "fast_accumulation": self.fp8_fast_accumulation,
        }  # fmt: skip
        allowed = "auto" if recipe else "none"
        for name in _FP8:
            found = getattr(self, name)
            if found != "auto" and (found == "none") == (recipe is not None):
                raise BadInput("PRECISION", "only FP8 recipes have this", where=f"precision.{name}",
                               found=f"{str(found).lower()} in {self.dtype}", allowed=allowed,
                               fix=f"--precision.{name} auto")  # fmt: skip
        if recipe is None:
            return None
        changes: dict[str, Any] = {k: v for k, v in values.items() if v != "auto"}
        if (layers := changes.pop("layers", None)) is not None:
            changes["first"], changes["last"] = layers
        return replace(recipe, **changes)


PARTS = tuple(f.name for f in fields(Precision) if f.name not in ("dtype", "device"))  # what changes a recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Slurm:
    """What jobs need of a Slurm cluster. "auto" leaves a choice to the cluster."""

    ranks_per_node: int = 8
    nodes: int | Literal["auto"] = "auto"
    partition: str = "auto"
    account: str = "auto"
    qos: str = "auto"
    time: str = "auto"
    gpus: Literal["gpus_per_node", "gres", "none"] = "gpus_per_node"
    gpu_type: str = "auto"
    exclusive: bool = True
    cpus_per_rank: int = 0
    memory: str = "auto"
    grace: int = 120  # seconds
    retries: int = 3
    container: str = "none"
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    container_mounts: Literal["none"] | tuple[str, ...] = "none"
    python: str = "auto"
    setup: Literal["none"] | tuple[str, ...] = "none"
    options: Literal["none"] | tuple[str, ...] = "none"
    usd_per_gpu_hour: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """Everything that decides a run's results. Two equal values train the same model on the same batches."""

    model: ModelSpec
    layout: Layout
    sequence_length: int
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_schedule: LearningRateSchedule = field(default_factory=LearningRateSchedule)
    data: Data = field(default_factory=Data)
    tokenizer: str = "bytes"  # or the path of a tokenizer.json
    train: Training = field(default_factory=Training)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    precision: Precision = field(default_factory=Precision)
    limits: Limits = field(default_factory=Limits)
    out: str = "runs"  # the folder that holds run folders
    trackers: tuple[TrackerName, ...] = ()  # what shows the metrics too
    slurm: Slurm = field(default_factory=Slurm)  # of its jobs; decides no results

    def saves_after(self, step: int) -> int:
        """How many checkpoints a run saves that goes on after `step`, if nothing disturbs it."""
        every, steps = self.checkpoint.every, self.train.steps
        return (steps // every - step // every if every else 0) + bool(not every or steps % every)

    @property
    def saves_in_background(self) -> bool:
        """Whether it does: one that saves only at its end waits for that anyway."""
        return self.checkpoint.asynchronous and self.saves_after(0) > 1

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch: its sequences times their length."""
        return self.layout.global_batch_size * self.sequence_length


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPrediction:
    """What was predicted of a run before it started, for its metrics.

    allocated_bytes  of tensors on rank 0; 0: not predicted
    step_s           seconds of a step; None where the devices have no known rates, as CPUs
    model_flops      of a step, all ranks: matmul parameters without the embedding lookup, full attention; 0: not known
    peak_flops       a second, of all ranks: the dense peak in the compute dtype; None where it is not known
    snapshot_bytes   of a rank's save in the background, on its host; 0: it has none
    """

    allocated_bytes: int = 0
    step_s: float | None = None
    model_flops: int = 0
    peak_flops: float | None = None
    snapshot_bytes: int = 0

    def mfu(self, seconds: float) -> float | None:
        """Model FLOPs utilisation of a step that took `seconds`; None without a known peak."""
        return self.model_flops / seconds / self.peak_flops if self.peak_flops and seconds > 0 else None
