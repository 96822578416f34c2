"""Make a question from texts or values: a model by name or config.json, a cluster by name, a batch in tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from penteract.config import catalog
from penteract.config.device_words import of_cpu
from penteract.config.files.cluster_text import refuse_file
from penteract.config.files.keys import find_key
from penteract.config.files.machine_file import machine_named
from penteract.config.hardware import HEADROOM, Cluster, check_cluster, cluster
from penteract.config.hf import model_from_hf
from penteract.config.layout import Layout
from penteract.config.model import ModelSpec
from penteract.config.optimizers import OPTIMIZERS, OptimizerName
from penteract.config.precision.module_patterns import Pattern
from penteract.config.precision.policy import RECIPES, Policy, nearest_recipe, policy
from penteract.config.resolve.presets import PRESETS
from penteract.config.rules.kernel_limits import check_elementwise
from penteract.config.rules.kernel_packages import PACKAGES, packages_here, read_packages
from penteract.config.run import PARTS, Precision
from penteract.errors import BadInput
from penteract.model.precision_patterns import check_modules
from penteract.planner.ask import Ask, Values, check_kernels
from penteract.planner.options import check_option, errors_for
from penteract.planner.token_counts import parse_batch
from penteract.units import printable

_USUAL_LENGTH = 8192  # tokens of a sequence, if the model has so many positions


def question(  # noqa: PLR0913 (a question has many parts)
    model: str | Path | ModelSpec,
    gpus: str | Cluster,
    *,
    sequence_length: int | None = None,
    batch: str | int = "1Mi",
    precision: str | Policy | Sequence[str | Policy] | None = None,
    parts: Mapping[str, Any] | None = None,
    modules: str | Sequence[str] = (),
    optimizer: str = "adamw",
    headroom: float = HEADROOM,
    imbalance: float = 1.0,
    tp_across_nodes: bool = False,
    pins: Mapping[str, Values] | None = None,
    packages: str | Collection[str] | None = None,
) -> Ask:
    """Make a question.

    batch      tokens, or a text such as `128seqs`
    precision  one or several; a text may have commas. By default that of `train`: bf16, on CPUs fp32
    parts      other keys of a run file's `[precision]`, for each precision
    modules    a short form of its patterns of module names
    packages   of kernels that the ranks have; by default all, and for GPUs "here" those that are installed

    Raises BadInput, with what is allowed.
    """
    m = model if isinstance(model, ModelSpec) else find_model(model)
    c = gpus if isinstance(gpus, Cluster) else cluster(gpus)
    check_cluster(c)
    length = min(_USUAL_LENGTH, m.max_positions) if sequence_length is None else sequence_length
    check_option("--seq", length)
    check_option("--headroom", headroom)
    check_option("--imbalance", imbalance)
    sequences = parse_batch(str(batch), length)
    check_option("--batch", sequences)
    patterns = modules.split(",") if isinstance(modules, str) else modules
    words = [word.strip() for word in patterns if word.strip()]
    if words and parts and "modules" in parts:
        raise BadInput("USAGE", "patterns of names are given twice", where="--modules", found="--precision.modules",
                       fix="leave one out")  # fmt: skip
    usual = "fp32" if of_cpu(c) else "bf16"
    with errors_for("--fix"):
        first, *also = _by_name(m, _precisions(usual if precision is None else precision, parts or {}), words)
    if c.gpu is not None:  # `peak` refuses a precision that the GPU does not have
        for p in (first, *also):
            c.gpu.peak(p.products)
            if p.fp8:
                c.gpu.peak("fp8")
    for p, elementwise in product((first, *also), (pins or {}).get("elementwise", ())):
        check_elementwise(elementwise, p, where="--fix elementwise", fix="--fix elementwise=reference")
    ask = Ask(
        model=m, cluster=c, sequence_length=length, global_batch_size=sequences,
        precision=first, also=tuple(also), optimizer=_optimizer(optimizer), headroom=headroom,
        imbalance=imbalance, tp_across_nodes=tp_across_nodes, pins=pins or {}, packages=_packages(packages, gpus),
    )  # fmt: skip
    elementwise = ask.elementwise if of_cpu(c) else "triton"
    for setting in ("attention", "experts", "elementwise", "fuse", "determinism"):
        for value in ask.pins.get(setting, ()):
            kernels: dict[str, Any] = {"elementwise": ask.pins.get("elementwise", (elementwise,))[-1], setting: value}
            check_kernels(ask, Layout(**kernels), "--fix")
    return ask


def _packages(named: str | Collection[str] | None, gpus: str | Cluster) -> frozenset[str]:
    if named is not None:
        return read_packages(named)
    return packages_here() if isinstance(gpus, str) and machine_named(gpus) else PACKAGES


def _optimizer(name: str) -> OptimizerName:
    for optimizer in OPTIMIZERS:
        if optimizer == name:
            return optimizer
    raise BadInput("VALUE", "no such optimizer", where="--optimizer", found=name, allowed=", ".join(OPTIMIZERS),
                   fix="--optimizer adamw")  # fmt: skip


def _precisions(named: str | Policy | Sequence[str | Policy], parts: Mapping[str, Any]) -> tuple[Policy, ...]:
    """The distinct precisions in their order, with these parts."""
    if isinstance(named, str):
        named = _names(named)
    elif isinstance(named, Policy):
        named = [named]
    found = [_with(p, _checked(parts)) for p in named]
    if not found:
        raise BadInput("PRECISION", "no precision to plan for", where="--precision", found="none", fix="bf16")
    return tuple(dict.fromkeys(found))


def _names(text: str) -> list[str]:
    """The names in a text with commas. Raises BadInput for another sign between them, and for a name of no recipe."""
    names = [name.strip() for name in text.split(",")]
    words = [word for word in re.split(r"[\s,;/+|]+", text) if word]
    bad = [name for name in names if name not in RECIPES]
    if not bad:
        return names
    joined = words != names and len(words) > 1
    raise BadInput("PRECISION", "several precisions are joined by commas" if joined else "no such precision",
                   where="--precision", found=printable(text if joined else bad[0], 80), allowed=", ".join(RECIPES),
                   fix=f"--precision {','.join(map(nearest_recipe, words or ['bf16']))}")  # fmt: skip


def _checked(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts, checked as keys of a run file."""
    found = dict[str, Any]()
    for name, value in parts.items():
        found[name] = find_key(f"precision.{name}", "parts").check(value, "parts")
        if name not in PARTS:
            raise BadInput("PRECISION", "no part of a precision", where="parts", found=name, allowed=", ".join(PARTS),
                           fix="precision=\"…\" names the recipe")  # fmt: skip
    return found


def _with(named: str | Policy, parts: Mapping[str, Any]) -> Policy:
    """The policy of a run file's section with this recipe and these parts."""
    found = policy(named, where="--precision", flag="--precision")
    if not parts:
        return found
    if isinstance(named, Policy):
        raise BadInput("PRECISION", "a policy takes no parts", where="parts", found=named.name,
                       allowed="parts of a recipe by name", fix="dataclasses.replace the policy")  # fmt: skip
    section: dict[str, Any] = {"dtype": named, **parts}
    return Precision(**section).policy


def _by_name(m: ModelSpec, precisions: Sequence[Policy], words: Sequence[str]) -> tuple[Policy, ...]:
    """The precisions with the patterns `words`. Refuses patterns without parameters in the model."""
    try:
        patterns = tuple(map(Pattern.of, words))
        found = tuple([replace(p, modules=(*p.modules, *patterns)) for p in precisions])
        for p in found:
            check_modules(m, p)
    except BadInput as bad:
        if words:
            bad.where, bad.fix = "--modules", bad.fix.replace("--precision.modules", "--modules")
        raise
    return found


def find_model(text: str | Path) -> ModelSpec:
    """A config.json, its folder, or a published model by name. Raises BadInput with the nearest names."""
    path = Path(text)
    if path.suffix == ".json" or path.is_dir():
        return model_from_hf(path)
    preset = PRESETS.get(str(text))
    if preset:
        return preset.model
    try:
        return catalog.model(str(text))
    except BadInput:
        refuse_other_file(str(text))
        raise


def refuse_other_file(text: str) -> None:
    """Raise BadInput for the path of a file, where a model is expected, that is no config.json."""
    allowed = "a published model, a config.json, or its folder"
    fix = "penteract plan --models lists the published ones"
    refuse_file(text, "no config.json of a model", where="model", allowed=allowed, fix=fix)
