"""The controls of the page, group by group: every part of a layout has one. Their bounds and meanings are those of run
files."""

from __future__ import annotations

from collections.abc import Mapping

from penteract.config.files.keys import keys
from penteract.config.layout import (
    ATTENTION_KERNELS,
    COLLECTIVES,
    CP_METHODS,
    DETERMINISM,
    ELEMENTWISE,
    EP_METHODS,
    EXPERT_KERNELS,
    EXPERT_ROWS,
    LOSS_KERNELS,
    ZERO_STAGES,
)
from penteract.config.rules.case import KEYS
from penteract.explore.answers.glossary import TERMS
from penteract.explore.schemas.page_schema import Control, ControlGroup
from penteract.schedule.registry import SCHEDULES

_DIMENSIONS = ("dp", "tp", "pp", "cp", "ep")
_GROUPS: Mapping[str, tuple[bool, tuple[str, ...]]] = {
    "Model and step": (True, ("model", "sequence_length", "global_batch_size", "layout.micro_batch_size")),
    "Parallelism": (True, tuple(f"layout.{name}" for name in _DIMENSIONS)),
    "Memory": (
        True,
        ("layout.zero", "layout.recompute", "layout.offload", "layout.offload_optimizer", "precision", "layout.loss"),
    ),
    "GPU": (True, ("gpu", "headroom", "tp_across_nodes")),
    "Pipeline, context, experts": (
        False,
        (
            "layout.schedule",
            "layout.vpp",
            "layout.last_stage_less_layers",
            "layout.cp_method",
            "layout.expert_tp",
            "layout.ep_method",
            "layout.expert_rows",
            "layout.capacity_percent",
        ),
    ),
    "More of ZeRO": (
        False,
        ("layout.shard_group", "layout.reshard_after_step", "layout.reduce_scatter_once", "layout.bucket_bytes"),
    ),
    "More of recomputation and offload": (
        False,
        ("layout.recompute_every", "layout.recompute_first", "layout.recompute_else", "layout.offload_every"),
    ),
    "More of precision": (False, ("parts.master", "parts.moments", "parts.gradient", "parts.reduce", "optimizer")),
    "Kernels": (
        False,
        (
            "layout.attention",
            "layout.elementwise",
            "layout.fuse",
            "layout.experts",
            "layout.collectives",
            "layout.determinism",
            "layout.loss_chunk",
        ),
    ),
}
_LABELS: Mapping[str, str] = {
    "dp": "Data", "tp": "Tensor", "pp": "Pipeline", "cp": "Context", "ep": "Expert", "gpu": "GPU", "zero": "ZeRO stage",
    "sequence_length": "Sequence length", "global_batch_size": "Batch, sequences", "micro_batch_size": "Micro-batch",
    "headroom": "Kept free", "tp_across_nodes": "Tensor ranks across nodes", "recompute": "Recompute",
    "offload": "Offload activations", "offload_optimizer": "Offload optimizer", "precision": "Recipe", "loss": "Loss",
    "schedule": "Schedule", "vpp": "Chunks a rank", "cp_method": "Context method", "expert_tp": "Expert tensor",
    "ep_method": "Expert method", "expert_rows": "Rows of experts",
    "capacity_percent": "Room of a block, %",
    "last_stage_less_layers": "Fewer layers in the last stage",
    "shard_group": "Shard group (HSDP)", "reshard_after_step": "Keep gathered", "reduce_scatter_once": "Reduce once",
    "bucket_bytes": "Gradient bucket, bytes", "recompute_every": "Every n-th layer", "recompute_first": "First layers",
    "recompute_else": "Other layers", "offload_every": "Offload every n-th", "master": "Master weights",
    "moments": "Moments", "gradient": "Gradients", "reduce": "Reduction", "optimizer": "Optimizer",
    "attention": "Attention", "elementwise": "Element-wise", "fuse": "Fusions", "experts": "Experts",
    "collectives": "Collectives", "determinism": "Determinism", "loss_chunk": "Tokens of a loss chunk",
    "model": "Model",
}  # fmt: skip
# Meanings of controls that are no keys of run files, or are keys of another name.
_ABOUT: Mapping[str, str] = {
    "model": "a published model, or the config.json of another: drop it anywhere on the page",
    "gpu": "the device; the degrees of parallelism say how many",
    "headroom": "share of the GPU's memory that tensors may not use: CUDA, communicators and libraries are there",
    "tp_across_nodes": "whether a tensor group may span nodes, over slower links",
    "precision": "a recipe: the dtypes of compute, gradients and optimizer",
    "optimizer": "optimizer of matrices between hidden states; AdamW updates the rest",
}
# Words that a control is about, where the page explains more than a line of a run file does.
_TERMS: Mapping[str, str] = {
    **{name: name for name in _DIMENSIONS}, "micro_batch_size": "micro-batch", "zero": "ZeRO", "recompute": "recompute",
    "offload": "offload",
}  # fmt: skip
_KEYS: Mapping[str, str] = {"optimizer": "optimizer.kind", "precision": "precision.dtype"}
_CHOICES = {
    "gpu", "precision", "optimizer", "zero", "schedule", "cp_method", "ep_method", "expert_rows", "attention", "loss",
    "elementwise", "experts", "collectives", "determinism", "fuse", "recompute", "recompute_else", "offload", "master",
    "moments", "gradient", "reduce",
}  # fmt: skip
_SWITCHES = {"tp_across_nodes", "offload_optimizer", "reshard_after_step", "reduce_scatter_once"}
# Values of settings that are words; of ZeRO's they are numbers.
WORDS: Mapping[str, tuple[str | int, ...]] = {
    "schedule": tuple(SCHEDULES), "cp_method": CP_METHODS, "ep_method": EP_METHODS, "expert_rows": EXPERT_ROWS,
    "attention": ATTENTION_KERNELS, "loss": LOSS_KERNELS,
    "elementwise": ELEMENTWISE, "experts": EXPERT_KERNELS, "collectives": COLLECTIVES, "determinism": DETERMINISM,
    "zero": ZERO_STAGES,
    "fuse": ("none", "all", "all+glu"),
    "recompute": ("none", "tp_all_gather+rms_norm+swiglu", "tp_all_gather+attention", "full"),
    "recompute_else": ("none", "full"), "offload": ("nothing", "layer_inputs", "*"),
}  # fmt: skip
TEXTS: Mapping[str, str] = {
    "tp_all_gather+rms_norm+swiglu": "norms and activation", "tp_all_gather+attention": "attention", "nothing": "none",
    "layer_inputs": "inputs of layers", "*": "all that is kept",
}  # fmt: skip
_ZERO = {0: "0 · nothing sharded", 1: "1 · optimizer", 2: "2 · gradients too", 3: "3 · parameters too"}


def groups() -> list[ControlGroup]:
    """All controls, under their headings."""
    return [
        {"title": title, "open": shown, "controls": [_control(name) for name in names]}
        for title, (shown, names) in _GROUPS.items()
    ]


def names() -> tuple[str, ...]:
    """The names of all controls: paths of their values in a question."""
    return tuple(name for _, some in _GROUPS.values() for name in some)


def leaf(name: str) -> str:
    """The last part of a control's name: its setting."""
    return name.rpartition(".")[2]


def key_of(name: str) -> str:
    """The key of a run file that a control sets; empty if there is none."""
    setting = leaf(name)
    if name.startswith("parts."):
        return f"precision.{setting}"
    return _KEYS.get(setting, "") or KEYS.get(setting, "")


def word(setting: str, value: object) -> str:
    """A value of a control as text."""
    if setting == "zero" and isinstance(value, int):
        return _ZERO[value]
    if isinstance(value, bool):
        return "yes" if value else "no"
    return TEXTS.get(str(value), str(value))


def _about(setting: str, of_key: str) -> str:
    """What a control means: in the page's words, or in those of the run file's key."""
    return TERMS[_TERMS[setting]] if setting in _TERMS else _ABOUT.get(setting) or of_key


def _control(name: str) -> Control:
    setting, key = leaf(name), keys().get(key_of(name))
    kind = (
        "model"
        if name == "model"
        else "choice"
        if setting in _CHOICES
        else "switch"
        if setting in _SWITCHES
        else "count"
    )
    if setting in (*_DIMENSIONS, "sequence_length", "global_batch_size", "micro_batch_size", "vpp", "expert_tp"):
        kind = "degree"
    return {
        "name": name,
        "label": _LABELS[setting],
        "about": _about(setting, key.about if key else ""),
        "input": kind,
        "dimension": setting if setting in _DIMENSIONS else "",
        "least": key.least if key else 0,
        "most": key.most if key else 1,
    }
