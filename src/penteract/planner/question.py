"""From what people type or pass to a question: a model by name or config.json, a cluster by name, a batch in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from penteract.config import catalog
from penteract.config.files.keys import find_key
from penteract.config.hardware import Cluster, cluster
from penteract.config.hf import model_from_hf
from penteract.config.kernel_limits import check_elementwise
from penteract.config.model import ModelSpec
from penteract.config.optimizers import OPTIMIZERS, OptimizerName
from penteract.config.precision.module_patterns import Pattern
from penteract.config.precision.policy import Policy, policy
from penteract.config.presets import PRESETS
from penteract.config.run import PARTS, Precision
from penteract.errors import BadInput
from penteract.model.modules import check_modules
from penteract.planner.ask import HEADROOM, Ask, Values, parse_batch
from penteract.planner.options import told_by

_USUAL_LENGTH = 8192  # tokens of a sequence, where the model has as many positions


def question(  # noqa: PLR0913 (what is asked has many sides)
    model: str | Path | ModelSpec,
    gpus: str | Cluster,
    *,
    sequence_length: int | None = None,
    batch: str | int = "1Mi",
    precision: str | Policy | Sequence[str | Policy] = "bf16",
    parts: Mapping[str, Any] | None = None,
    modules: str | Sequence[str] = (),
    optimizer: str = "adamw",
    headroom: float = HEADROOM,
    tp_across_nodes: bool = False,
    pins: Mapping[str, Values] | None = None,
) -> Ask:
    """The question that these texts and values make. `batch`: tokens, or `128seqs`. `precision`: one or several, as a
    text with commas too; `parts`: what a run file's `[precision]` may say beside the recipe, of each of them;
    `modules`: a short form of its patterns of names.

    Raises BadInput, naming what is allowed.
    """
    m = model if isinstance(model, ModelSpec) else find_model(model)
    c = gpus if isinstance(gpus, Cluster) else cluster(gpus)
    length = min(_USUAL_LENGTH, m.max_positions) if sequence_length is None else sequence_length
    if length < 1:
        raise BadInput("VALUE", "an empty sequence", where="--seq", found=length, allowed="1 or more", fix="--seq 8192")
    if not 0 <= headroom < 1:
        fix = f"--headroom {HEADROOM}"
        raise BadInput("VALUE", "not a share", where="--headroom", found=headroom, allowed="0 to 1", fix=fix)
    patterns = modules.split(",") if isinstance(modules, str) else modules
    words = [word.strip() for word in patterns if word.strip()]
    if words and parts and "modules" in parts:
        raise BadInput("USAGE", "patterns of names are given twice", where="--modules", found="--precision.modules",
                       fix="leave one out")  # fmt: skip
    with told_by("--fix"):
        first, *also = _by_name(m, _precisions(precision, parts or {}), words)
    if c.gpu is not None:  # which refuses a precision that it does not have
        for p in (first, *also):
            c.gpu.peak(p.products)
            if p.fp8:
                c.gpu.peak("fp8")
    for p, elementwise in product((first, *also), (pins or {}).get("elementwise", ())):
        check_elementwise(elementwise, p, where="--fix elementwise", fix="--fix elementwise=reference")
    return Ask(
        model=m, cluster=c, sequence_length=length, global_batch_size=parse_batch(str(batch), length),
        precision=first, also=tuple(also), optimizer=_mover(optimizer), headroom=headroom,
        tp_across_nodes=tp_across_nodes, pins=pins or {},
    )  # fmt: skip


def _mover(name: str) -> OptimizerName:
    for known in OPTIMIZERS:
        if known == name:
            return known
    raise BadInput("VALUE", "no such optimizer", where="--optimizer", found=name, allowed=", ".join(OPTIMIZERS),
                   fix="--optimizer adamw")  # fmt: skip


def _precisions(named: str | Policy | Sequence[str | Policy], parts: Mapping[str, Any]) -> tuple[Policy, ...]:
    """Each once, in their order, with these parts."""
    if isinstance(named, str):
        named = [name.strip() for name in named.split(",")]
    elif isinstance(named, Policy):
        named = [named]
    found = [_with(p, _checked(parts)) for p in named]
    if not found:
        raise BadInput("PRECISION", "no precision to plan for", where="--precision", found="none", fix="bf16")
    return tuple(dict.fromkeys(found))


def _checked(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Values as the keys of a run file take them."""
    found = dict[str, Any]()
    for name, value in parts.items():
        found[name] = find_key(f"precision.{name}", "parts").check(value, "parts")
        if name not in PARTS:
            raise BadInput("PRECISION", "no part of a precision", where="parts", found=name, allowed=", ".join(PARTS),
                           fix="precision=\"…\" names the recipe")  # fmt: skip
    return found


def _with(named: str | Policy, parts: Mapping[str, Any]) -> Policy:
    """As a run file's section of this recipe and these parts means it."""
    found = policy(named, where="--precision", flag="--precision")
    if not parts:
        return found
    if isinstance(named, Policy):
        raise BadInput("PRECISION", "a policy is whole", where="parts", found=named.name,
                       allowed="parts of a recipe by name", fix="dataclasses.replace the policy")  # fmt: skip
    said: dict[str, Any] = {"dtype": named, **parts}
    return Precision(**said).policy


def _by_name(m: ModelSpec, precisions: Sequence[Policy], words: Sequence[str]) -> tuple[Policy, ...]:
    """The precisions with the patterns that `words` are, which the model has parameters for."""
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
    known = PRESETS.get(str(text))
    return known.model if known else catalog.model(str(text))
