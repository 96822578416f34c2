"""A question to the planner as a frozen value, and parsers of the texts on the command line."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from penteract.config.device_words import device_word, of_cpu
from penteract.config.files.keys import ELSEWHERE, keys
from penteract.config.files.sections import Kernels
from penteract.config.hardware import HEADROOM, Cluster, Gpu
from penteract.config.layout import (
    ATTENTION_KERNELS,
    COLLECTIVES,
    CP_METHODS,
    DETERMINISM,
    ELEMENTWISE,
    EP_METHODS,
    EVERY_FUSION,
    EXPERT_KERNELS,
    EXPERT_ROWS,
    FUSIONS,
    LOSS_KERNELS,
    ZERO_STAGES,
    AttentionKernel,
    Collectives,
    CpMethod,
    Determinism,
    Elementwise,
    EpMethod,
    ExpertKernel,
    Fusion,
    Layout,
    named_fusions,
)
from penteract.config.model import ModelSpec
from penteract.config.optimizers import OptimizerKinds, OptimizerName
from penteract.config.precision.policy import RECIPES, Policy
from penteract.config.recompute import NONE, WHOLE, MemoryBudget, name_of, ops_of
from penteract.config.rules.case import KEYS
from penteract.config.rules.ep_methods import lighter_ep_method
from penteract.config.rules.expert_kernels import fastest_experts
from penteract.config.rules.kernel_gpus import check_kernels_for
from penteract.config.rules.kernel_limits import fastest_attention, fastest_elementwise, fastest_fusions
from penteract.config.rules.kernel_packages import PACKAGES
from penteract.config.run import Optimizer
from penteract.errors import BadInput
from penteract.schedule.registry import SCHEDULES

RECOMPUTE = WHOLE  # name of a recomputation -> the ops it recomputes

_SHORT = {"mbs": "micro_batch_size", "micro_batch": "micro_batch_size"}
_LONG = {"micro_batch_size": "mbs"}
_WORDS: Mapping[str, Collection[str]] = {
    "schedule": SCHEDULES,
    "cp_method": CP_METHODS,
    "ep_method": EP_METHODS,
    "expert_rows": EXPERT_ROWS,
    "attention": ATTENTION_KERNELS,
    "loss": LOSS_KERNELS,
    "elementwise": ELEMENTWISE,
    "experts": EXPERT_KERNELS,
    "collectives": COLLECTIVES,
    "determinism": DETERMINISM,
}
_CHOICES = ("reduce_scatter_once", "reshard_after_step", "offload_optimizer")  # true or false
# The fields of a layout; its accumulation steps follow from the batch.
LAYOUT_SETTINGS = tuple(f.name for f in fields(Layout) if f.name != "gradient_accumulation_steps")
LOSS = Kernels().loss  # the default of a run
# Settings of recomputation and offload.
EDITS = (
    "recompute", "recompute_every", "recompute_first", "recompute_else", "offload", "offload_every",
)  # fmt: skip
# Left out of a layout's text and JSON if they have their default.
_QUIET = ("last_stage_less_layers", "expert_rows", "capacity_percent", "shard_group", *_CHOICES, "loss_chunk", "fuse",
          "experts", "collectives", "determinism", "bucket_bytes")  # fmt: skip

Values = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Which layouts of `model` on `cluster` are best for a step of `global_batch_size` sequences?

    pins      setting -> the values to which the search is restricted
    headroom  fraction of a GPU's memory that tensors may not use
    imbalance  tokens that the experts of the fullest GPU get, over the mean; only where ep > 1
    also      further precisions to try
    packages  of kernels that the ranks have in addition to torch
    """

    model: ModelSpec
    cluster: Cluster
    sequence_length: int
    global_batch_size: int
    precision: Policy = RECIPES["bf16"]
    also: tuple[Policy, ...] = ()
    optimizer: OptimizerName = "adamw"
    headroom: float = HEADROOM
    imbalance: float = 1.0
    tp_across_nodes: bool = False
    pins: Mapping[str, Values] = field(default_factory=dict[str, Values])
    packages: frozenset[str] = PACKAGES

    @property
    def optimizer_kinds(self) -> OptimizerKinds:
        """The optimizer of each kind of parameter."""
        return Optimizer(kind=self.optimizer).optimizer_kinds

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch_size * self.sequence_length

    @property
    def each(self) -> tuple[Ask, ...]:
        """The question in one precision, for each of them."""
        return tuple(replace(self, precision=p, also=()) for p in (self.precision, *self.also))

    @property
    def gpu(self) -> Gpu | None:
        """What kernels are chosen for; None for a CPU, which runs none that are written for GPUs."""
        return None if of_cpu(self.cluster) else self.cluster.gpu

    def attention(self, cp: int, method: CpMethod, determinism: Determinism = "off") -> AttentionKernel:
        """The fastest attention kernel for such layouts on GPUs; the reference kernel without a GPU."""
        gpu = self.gpu
        if gpu is None:
            return "reference"
        part = Layout(cp=cp, cp_method=method, determinism=determinism)
        return fastest_attention(self.model, part, self.precision, self.packages, capability=gpu.capability)

    @property
    def elementwise(self) -> Elementwise:
        """The fastest elementwise kernels on GPUs; the reference kernels without a GPU."""
        return "reference" if self.gpu is None else fastest_elementwise(self.precision)

    def fuse(self, tp: int, elementwise: Elementwise) -> tuple[Fusion, ...]:
        """The ops that are fused where these kernels compute them: all with Triton's, none with plain torch."""
        gpu = self.gpu
        if elementwise == "reference":
            return ()
        if gpu is None:
            return FUSIONS
        return fastest_fusions(self.model, Layout(tp=tp), self.precision, self.packages, capability=gpu.capability)

    def experts(self, expert_tp: int, determinism: Determinism = "off") -> ExpertKernel:
        """The fastest kernel for experts' products on GPUs; the reference kernel without a GPU."""
        gpu, part = self.gpu, Layout(expert_tp=expert_tp, determinism=determinism)
        if gpu is None:
            return "reference"
        return fastest_experts(self.model, part, self.precision, self.packages, capability=gpu.capability)

    def ep_method(self, ep: int) -> EpMethod:
        """How tokens get to experts that `ep` ranks share."""
        return lighter_ep_method(self.model, ep)

    @property
    def collectives(self) -> Collectives:
        """Overlapped where links like those inside its nodes were measured directly."""
        return "overlapped" if self.cluster.reads_directly else "library"

    def text(self, layout: Layout, precision: Policy | None = None) -> str:
        """A layout as text for `--layout`. `precision`: its own, where several are asked for."""
        ask = self if precision is None else replace(self, precision=precision, also=())
        usual = Layout(
            elementwise=ask.elementwise, fuse=ask.fuse(layout.tp, layout.elementwise), collectives=ask.collectives,
            experts=ask.experts(layout.expert_tp, layout.determinism), ep_method=ask.ep_method(layout.ep),
            attention=ask.attention(layout.cp, layout.cp_method, layout.determinism),
        )  # fmt: skip
        return as_text(layout, usual)

    def devices(self, count: int = 1) -> str:
        """What one rank has, or so many, in words: GPUs, or processes of a CPU."""
        return device_word(count, on_cpus=of_cpu(self.cluster))

    @property
    def more_memory(self) -> str:
        """What would have room for what does not fit: processes of a CPU share its memory, so more of them do not."""
        return "a host with more memory" if of_cpu(self.cluster) else "more GPUs"

    @property
    def usable(self) -> int:
        """Bytes of a GPU that tensors may take; 0 if its memory is not known."""
        return self.cluster.usable(self.headroom)


def check_kernels(ask: Ask, layout: Layout, flag: str) -> None:
    """Refuse kernels that the GPUs of a question cannot run, with the fastest that they can."""

    def fastest(setting: str) -> str:
        able = {
            "attention": ask.attention(layout.cp, layout.cp_method, layout.determinism),
            "experts": ask.experts(layout.expert_tp, layout.determinism), "determinism": "off",
            "fuse": fusions_word(ask.fuse(layout.tp, layout.elementwise)), "elementwise": ask.elementwise,
        }  # fmt: skip
        repeats = layout.determinism == "bitwise" and setting == "elementwise"
        return f"{flag} {setting}={'triton' if repeats else able[setting]}, or leave {setting} out"

    if ask.cluster.gpu is not None:
        check_kernels_for(ask.model, layout, ask.cluster.gpu, lambda setting: f"{flag} {setting}", fastest)


def recompute_of(layout: Layout) -> str:
    """The layout's recomputation by name."""
    return _joined(layout.recompute)


def _joined(words: tuple[str, ...]) -> str:
    """The name of a recomputation, or its words as text for `--layout`."""
    name = name_of(words)
    return name if isinstance(name, str) else "+".join(name) or "nothing"


def edits_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of recomputation and offload, as fields of a layout."""
    return {name: _words(settings[name]) for name in EDITS if name in settings}


def _words(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return () if value == "nothing" else ops_of(value if value in WHOLE else value.split("+"))


def budget_of(recompute: str) -> MemoryBudget | None:
    """The budget of `budget:0.8` (of the activations without recomputation) or `budget:70GiB` (of all tensors)."""
    kind, colon, text = recompute.partition(":")
    if kind != "budget":
        return None
    number = text.removesuffix("GiB")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not colon or not (0 < value <= (1 if number == text else 1e6)):
        raise BadInput("BUDGET", "not a budget", where="recompute", found=recompute,
                       allowed="budget:0.8 (up to 1, of the activations without recomputation) or budget:70GiB "
                       "(of all tensors)",
                       fix="recompute=budget:0.8")  # fmt: skip
    return MemoryBudget(value) if number == text else MemoryBudget(allocated=int(value * 2**30))


def as_settings(layout: Layout) -> dict[str, Any]:
    """A layout as the planner's settings: as JSON shows it, and as `--layout` reads it."""
    plain = Layout()
    named = {name: getattr(layout, name) for name in LAYOUT_SETTINGS if name not in (*EDITS, *_QUIET)}
    named["recompute"] = recompute_of(layout)
    for name in (*_QUIET, *EDITS):
        value = getattr(layout, name)
        if value != getattr(plain, name):
            named[name] = (
                value if isinstance(value, (int, str)) else fusions_word(value) if name == "fuse" else _joined(value)
            )
    return {name: named[name] for name in LAYOUT_SETTINGS if name in named}


def as_shown(layout: Layout) -> dict[str, Any]:
    """The same as people read it: where tp is 1 there is no `tp_all_gather`, so none is recomputed. The rest is the
    same program."""
    settings = as_settings(layout)
    for name in ("recompute", "recompute_else") if layout.tp == 1 else ():
        ops = str(settings.get(name, "")).split("+")
        if len(ops) > 1 and NONE[0] in ops:
            settings[name] = "+".join(op for op in ops if op != NONE[0])
    return settings


def fusions_word(fuse: tuple[str, ...]) -> str:
    """`all`: those that need no package."""
    rest = [name for name in fuse if name not in FUSIONS]
    return "+".join(["all", *rest] if len(fuse) == len(FUSIONS) + len(rest) else fuse) or "none"


def as_word(value: Any) -> str:
    """One value as text for options."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_text(layout: Layout, usual: Layout) -> str:
    """A layout as text for `--layout`: dp, the micro-batch size, and all that differs from the defaults. `usual` has
    those that depend on the device or on other settings."""
    kernels = Layout(loss=LOSS, elementwise=usual.elementwise)
    plain, settings = as_settings(kernels) | _derived(usual), as_shown(layout) | _derived(layout)
    always = ("dp", "micro_batch_size")
    return ",".join(
        f"{_LONG.get(name, name)}={as_word(settings[name])}"
        for name in settings
        if name in always or settings[name] != plain.get(name)
    )


def _derived(layout: Layout) -> dict[str, str]:
    """Those whose default depends on the device or on other settings: `as_settings` leaves some out."""
    named = {"fuse": fusions_word(layout.fuse), "experts": layout.experts, "collectives": layout.collectives}
    return {"ep_method": layout.ep_method, "attention": layout.attention, **named}


def parse_settings(text: str, *, flag: str, several: bool) -> dict[str, Values]:
    """`tp=2,zero=0/1,recompute=none` as setting -> values; more than one value (`/`) only where `several`."""
    found: dict[str, Values] = {}
    parts = list(filter(None, (p.strip() for p in text.split(","))))
    for at, part in enumerate(parts):
        name, equals, written = part.partition("=")
        setting = _SHORT.get(name.strip(), name.strip())
        if at and not equals and setting not in LAYOUT_SETTINGS:
            raise _values_apart(parts[:at], part, flag, several=several)
        if setting not in LAYOUT_SETTINGS:
            near = _nearest_setting(setting)
            raise BadInput(
                "SETTING", "no such setting of a layout", where=flag, found=name, allowed=", ".join(LAYOUT_SETTINGS),
                fix=f"{flag} {near}=…" if near else "choose one of these",
            )  # fmt: skip
        words = [w.strip() for w in written.split("/")]
        if not equals or not all(words):
            what = "a setting takes values, as tp=2/4" if several else "a setting takes a value"
            raise BadInput("SETTING", what, where=flag, found=part, fix=f"{flag} {setting}=…")
        if len(words) > 1 and not several:
            raise BadInput("SETTING", "a setting takes one value", where=flag, found=part,
                           fix=f"{flag} {name}={words[0]}, or --fix {part} for the best with any of them")  # fmt: skip
        if setting in found:
            raise BadInput(
                "SETTING", "a setting is given twice", where=flag, found=part, fix=f"keep one {name.strip()}=…"
            )
        # Numbers in ascending order, as the search needs it; words in the order of their table.
        order = [*_WORDS.get(setting, ())]
        if setting == "recompute":
            order = [*RECOMPUTE, *(w for w in words if w not in RECOMPUTE)]
        found[setting] = tuple(
            sorted({_value(setting, word, flag) for word in words}, key=lambda v: order.index(v) if order else v)
        )
    return found


def _values_apart(before: Sequence[str], part: str, flag: str, *, several: bool) -> BadInput:
    """The refusal of `tp=2,4`, whose comma ends the setting before it."""
    last = max(at for at, word in enumerate(before) if "=" in word or not at)
    setting, _, value = before[last].partition("=")
    values = [value or "…", *before[last + 1 :], part]
    either = f"--fix {setting}={'/'.join(values)}"
    fix = either if several else f"{flag} {setting}={values[0]}, or {either}"
    if setting in (*EDITS, "fuse") and not {*values} & {*RECOMPUTE, "all"}:
        both = f"{flag} {setting}={'+'.join(values)}"
        fix = f"{both}, or {either} for each alone" if several else both
    return BadInput("SETTING", "a comma ends a setting, and / joins its values", where=flag,
                    found=",".join((*before[last:], part)), fix=fix)  # fmt: skip


def _nearest_setting(name: str) -> str:
    """The setting that `name` probably means, or an empty string."""
    meant = (ELSEWHERE.get(f"parallel.{name}") or ELSEWHERE.get(name, "")).rpartition(".")[2]
    if meant in LAYOUT_SETTINGS:
        return meant
    return next(iter(get_close_matches(name, [*LAYOUT_SETTINGS, *_SHORT], n=1, cutoff=0.7)), "")


def _value(setting: str, word: str, flag: str) -> Any:
    if setting in ("recompute", "recompute_else", "offload"):
        return word
    if setting == "fuse":
        return read_fusions(word, flag)
    if setting in _WORDS:
        if word in _WORDS[setting]:
            return word
        near = get_close_matches(word, _WORDS[setting], n=1, cutoff=0.0)[0]
        raise BadInput(
            "SETTING", f"no such {setting}", where=flag, found=word, allowed=", ".join(_WORDS[setting]),
            fix=f"{flag} {setting}={near}",
        )  # fmt: skip
    if setting in _CHOICES:
        if word not in ("true", "false"):
            raise BadInput("SETTING", "neither true nor false", where=f"{flag} {setting}", found=word,
                           allowed="true, false", fix=f"{setting}=true")  # fmt: skip
        return word == "true"
    value = int(word) if word.isascii() and word.isdigit() and len(word) < 16 else -1
    if setting == "zero" and value not in ZERO_STAGES:
        allowed = ", ".join(map(str, ZERO_STAGES))
        fix = f"{flag} zero={ZERO_STAGES[-1]}"
        raise BadInput("SETTING", "no such ZeRO stage", where=flag, found=word, allowed=allowed, fix=fix)
    key = keys()[KEYS[setting]]
    if not key.least <= value <= key.most:
        raise BadInput("SETTING", "not a size", where=f"{flag} {setting}", found=word[:40],
                       allowed=f"{key.least} to {key.most}", fix=f"{setting}={max(1, int(key.least))}")  # fmt: skip
    return value


def read_fusions(word: str, flag: str) -> tuple[Fusion, ...]:
    """`none`, `all` (those that need no package), or names joined by `+`; `all` may be one of them."""
    if word == "none":
        return ()
    names = named_fusions(word.split("+"))
    if unknown := [name for name in names if name not in EVERY_FUSION]:
        raise BadInput("SETTING", "no such fusion", where=f"{flag} fuse", found=unknown[0],
                       allowed=", ".join(("none", "all", *EVERY_FUSION)), fix="fuse=all")  # fmt: skip
    return tuple(name for name in EVERY_FUSION if name in names)
