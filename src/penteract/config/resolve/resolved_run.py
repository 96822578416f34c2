"""From a run file, a preset and flags to one `RunSpec`, with the origin of each value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from penteract.config.files.keys import keys
from penteract.config.files.read import Setting, Settings, read_overrides, read_toml
from penteract.config.hf import model_from_hf
from penteract.config.layout import FUSIONS, Fusion, Layout
from penteract.config.model import LatentSpec, ModelSpec, MoESpec, RopeScaling
from penteract.config.recompute import MemoryBudget, ops_of
from penteract.config.resolve import expert_settings
from penteract.config.resolve.presets import preset as find_preset
from penteract.config.rules.case import Case
from penteract.config.rules.legal import check_legal
from penteract.config.rules.settle import Settle
from penteract.config.run import (
    Checkpoint,
    Data,
    LearningRateSchedule,
    Limits,
    Optimizer,
    Precision,
    RunSpec,
    Slurm,
    TrackerName,
    Training,
)
from penteract.errors import BadInput

# The parts of a model that have their own sections.
_PARTS: Mapping[str, type] = {"moe": MoESpec, "latent": LatentSpec, "rope_scaling": RopeScaling}
_BUDGETS = ("memory.budget", "memory.budget_gib")
_CHOSEN = tuple(f"memory.{name}" for name in ("chosen", "recompute_every", "recompute_first", "recompute_else"))
_BYTES = 257  # tokens of the byte tokenizer: 256 bytes and the end of a document


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A run, and for each key of its file the origin of its value: `run.toml:7`, `--parallel.tp`,
    `preset tiny`, `default`, or `derived: 16 / (4·1)`."""

    run: RunSpec
    origins: Mapping[str, str]
    budget: MemoryBudget | None = (
        None  # solved later, with prices; until then the layout recomputes the ops of `memory.chosen`, or none
    )
    file: Path | None = None  # the run file whose lines `origins` names

    def is_open(self, key: str) -> bool:
        """Whether nobody decided a key."""
        return self.origins.get(key, "default") == "default"


def resolve(
    toml_path: str | Path | None = None,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    world: int | None = None,
) -> Resolved:
    """Defaults < preset < file < overrides, checked as a whole.

    `overrides`: `--a.b v`, `--a.b=v` or `a.b=v`. `world`: the number of ranks; None: the layout decides.
    A run that names no model trains the preset "tiny". Raises BadInput; `BadLayout` for an illegal layout.
    """
    given = _run_file(Path(toml_path)) if toml_path is not None else {}
    if toml_path is not None and preset is None and any(k.startswith("model.") for k in given):
        preset = ""  # the file describes its own model
    flags = read_overrides(overrides)
    asked = flags.pop("preset", None) or given.pop("preset", None)
    if not preset and asked:
        name, where = str(asked.value), f"preset ({asked.origin})"
    else:
        name, where = "tiny" if preset is None else preset, "--preset"
    settings, largest = _defaults(), 1
    if name:
        chosen = find_preset(name, where=where)
        origin = f"preset {name}"
        settings |= {k: Setting(keys()[k].check(v, origin), origin) for k, v in chosen.settings.items()}
        settings |= _model_settings(chosen.model, origin)
        largest = int(settings["batch.micro_batch_size"].value)
        settings["batch.micro_batch_size"] = Setting("auto", origin)
    config = flags.pop("model.config", None) or given.pop("model.config", None)
    if config:
        settings = {k: s for k, s in settings.items() if not k.startswith("model.")}
        settings |= _model_settings(model_at(Path(config.value)), f"{config.value}")
    made = _build(settings | given | flags, [given, flags], largest, world)
    return made if toml_path is None else replace(made, file=Path(toml_path))


def _run_file(path: Path) -> Settings:
    """The values of a run file. Raises BadInput; where no file lies but a preset has that name, with the option for
    it: `plan` and `bench` take such names where this takes a file."""
    try:
        return read_toml(path)
    except BadInput as error:
        if path.exists():
            raise
        try:
            find_preset(str(path))
        except BadInput:
            raise error from None
    raise BadInput("FILE", "the name of a preset or a model, where a run file is expected", found=path,
                   allowed="the path of a run file", fix=f"--preset {path}")  # fmt: skip


def model_at(path: Path) -> ModelSpec:
    """The model of a config.json, of a folder with one, or of a run's folder."""
    if (path / "run.toml").is_file():
        given = {k: s for k, s in read_toml(path / "run.toml").items() if k.startswith("model.")}
        return _model(_with_model_defaults(given))
    return model_from_hf(path)


def _defaults() -> Settings:
    """The defaults of every section except the model's, which depend on the model."""
    return {
        key.name: Setting(key.default, "default") for key in keys().values() if not key.name.startswith("model.")
    }  # fmt: skip


def _model_settings(model: ModelSpec, origin: str) -> Settings:
    found: Settings = {}
    parts: dict[str, Any] = {"model": model} | {f"model.{name}": getattr(model, name) for name in _PARTS}
    for prefix, part in parts.items():
        if part is not None:
            for f in fields(part):
                if f"{prefix}.{f.name}" in keys():
                    found[f"{prefix}.{f.name}"] = Setting(getattr(part, f.name), origin)
    return found


def _build(settings: Settings, layers: list[Settings], largest: int, world: int | None) -> Resolved:
    settings = _with_model_defaults(settings)
    _batch_size(settings, layers)
    _last_of_budgets(settings, layers[-1])
    model, budget = _model(settings), _budget(settings)
    expert_settings.follow(settings, layers, model)
    layout, length = _layout(settings, model, largest, world), settings["batch.sequence_length"].value
    _precision(settings)
    run = RunSpec(
        model=model, layout=layout, sequence_length=length,
        optimizer=Optimizer(**_section(settings, "optimizer")),
        lr_schedule=LearningRateSchedule(**_section(settings, "learning_rate")),
        data=Data(**_section(settings, "data")),
        tokenizer=settings["tokenizer.source"].value,
        train=Training(**_section(settings, "training")),
        checkpoint=Checkpoint(**_section(settings, "checkpoint")),
        precision=Precision(**_section(settings, "precision")),
        limits=Limits(**_section(settings, "limits")),
        out=settings["output.folder"].value,
        trackers=_trackers(settings["output.trackers"]),
        slurm=Slurm(**_section(settings, "slurm")),
    )  # fmt: skip
    _check_sections(run, settings)
    return Resolved(run=run, origins={k: settings[k].origin for k in settings}, budget=budget)


def _trackers(named: Setting) -> tuple[TrackerName, ...]:
    """Each once. Raises BadInput for one that is named twice."""
    trackers = () if named.value == "none" else tuple(named.value)
    if len(set(trackers)) < len(trackers):
        raise BadInput("TRACKER", "a tracker is named twice", where=f"output.trackers ({named.origin})",
                       found=", ".join(trackers), fix="name each once")  # fmt: skip
    return trackers


def _last_of_budgets(settings: Settings, flags: Settings) -> None:
    """If the command line sets another recomputation or budget, drop what the run file has of it."""
    flag = flags.get("memory.recompute")
    other = flag is not None and flag.value != "budget"
    dropped = _BUDGETS if other or flags.keys() & {*_BUDGETS} else ()
    if other and settings["memory.chosen"].value != "none":
        dropped = (*dropped, *_CHOSEN)  # what the budget chose
    for key in dropped:
        if key not in flags:
            settings[key] = Setting(keys()[key].default, "default")


def _budget(settings: Settings) -> MemoryBudget | None:
    """The bound of `recompute = "budget"`. Raises BadInput if it has none, or if a budget is given without it."""
    recompute = settings["memory.recompute"]
    given = {k: settings[k] for k in _BUDGETS if settings[k].value}
    chosen = settings["memory.chosen"]
    if recompute.value != "budget" and chosen.value != "none":
        op_names = chosen.value if isinstance(chosen.value, str) else ",".join(chosen.value)
        raise BadInput("BUDGET", "ops chosen by a budget, but there is no budget",
                       where=f"memory.chosen ({chosen.origin})", found=op_names,
                       allowed='only with memory.recompute "budget"',
                       fix=f"--memory.recompute {op_names}")  # fmt: skip
    if recompute.value == "budget" and len(given) == 1:
        return MemoryBudget(settings["memory.budget"].value, int(settings["memory.budget_gib"].value * 2**30))
    if recompute.value != "budget" and not given:
        return None
    what = "a budget is given twice" if len(given) == 2 else "a budget without a bound"
    if recompute.value != "budget":
        what = 'a budget without memory.recompute "budget"'
    where = ", ".join(f"{k} ({s.origin})" for k, s in given.items()) or f"memory.recompute ({recompute.origin})"
    raise BadInput("BUDGET", what, where=where, found=", ".join(str(s.value) for s in given.values()) or "none",
                   allowed='memory.recompute "budget" with one of memory.budget and memory.budget_gib',
                   fix="--memory.recompute budget --memory.budget 0.8")  # fmt: skip


def _section(settings: Settings, section: str) -> dict[str, Any]:
    depth = section.count(".") + 1
    return {
        k.rsplit(".", 1)[1]: s.value
        for k, s in settings.items()
        if k.startswith(f"{section}.") and k.count(".") == depth
    }


def _with_model_defaults(settings: Settings) -> Settings:
    """All keys of the model: required ones must be given, the others get their defaults."""
    settings = dict(settings)
    value = {k: s.value for k, s in settings.items()}
    if "model.heads" in value and "model.kv_heads" not in value:
        settings["model.kv_heads"] = Setting(value["model.heads"], f"derived: heads = {value['model.heads']}")
    if {"model.heads", "model.hidden_size"} <= value.keys() and "model.head_size" not in value:
        hidden, heads = value["model.hidden_size"], value["model.heads"]
        if hidden % heads == 0:
            settings["model.head_size"] = Setting(hidden // heads, f"derived: {hidden} / {heads}")
    parts = ["model"] + [f"model.{p}" for p in _PARTS if any(k.startswith(f"model.{p}.") for k in settings)]
    missing: list[str] = []
    for key in keys().values():
        if key.name.rsplit(".", 1)[0] in parts and key.name not in settings:
            if key.required:
                missing.append(key.name)
            settings[key.name] = Setting(key.default, "default")
    if missing:
        fix = "give them, or start from a preset or a config.json (`preset = …`, `[model] config = …`)"
        raise BadInput("MISSING", "the model is not whole", found="no " + ", no ".join(missing), fix=fix)
    return settings


def _model(settings: Settings) -> ModelSpec:
    parts = {name: kind(**given) for name, kind in _PARTS.items() if (given := _section(settings, f"model.{name}"))}
    return ModelSpec(**_section(settings, "model"), **parts)


def _batch_size(settings: Settings, layers: list[Settings]) -> None:
    """Convert tokens per step to sequences per step; if both are set, the later one decides."""
    tokens = settings.pop("batch.global_batch_tokens")
    if tokens.value is None:
        return
    for layer in layers:
        both = [layer.get(k) for k in ("batch.global_batch_size", "batch.global_batch_tokens")]
        if both[0] and both[1]:
            raise BadInput(
                "BATCH", "the global batch is given twice", where=f"{both[0].origin}, {both[1].origin}",
                fix="keep global_batch_size (sequences) or global_batch_tokens",
            )  # fmt: skip
        if both[0]:
            tokens = None
        elif both[1]:
            tokens = both[1]
    if tokens is None:
        return
    length = settings["batch.sequence_length"].value
    if tokens.value % length:
        below = tokens.value // length * length
        near = [n for n in (below, below + length) if n]
        raise BadInput(
            "BATCH", f"no whole number of sequences of {length} tokens",
            where=f"batch.global_batch_tokens ({tokens.origin})", found=tokens.value,
            allowed=", ".join(map(str, near)), fix=f"--batch.global_batch_tokens {near[0]}",
        )  # fmt: skip
    why = f"derived: {tokens.value} / {length}"
    settings["batch.global_batch_size"] = Setting(
        keys()["batch.global_batch_size"].check(tokens.value // length, why), why
    )


def _layout(settings: Settings, model: ModelSpec, largest: int, world: int | None) -> Layout:
    """The complete layout; derived values are written back into `settings`."""
    parallel, batch, memory = (_section(settings, s) for s in ("parallel", "batch", "memory"))
    left = {name: parallel if name == "dp" else batch for name in ("dp", "micro_batch_size")}
    settle = Settle(
        open=frozenset(name for name, section in left.items() if section[name] == "auto"), largest_micro_batch=largest
    )  # fmt: skip
    for name in settle.open:
        left[name][name] = 1
    total, length = batch["global_batch_size"], batch["sequence_length"]
    parallel["ep_method"] = expert_settings.ep_method(settings, model)
    layout = Layout(
        **parallel, micro_batch_size=batch["micro_batch_size"], bucket_bytes=memory["bucket_bytes"],
        recompute=ops_of(memory["chosen" if memory["recompute"] == "budget" else "recompute"]),
        recompute_every=memory["recompute_every"], recompute_first=memory["recompute_first"],
        recompute_else=ops_of(memory["recompute_else"]),
        offload=() if memory["offload"] == "none" else ops_of(memory["offload"]),
        offload_every=memory["offload_every"], offload_optimizer=memory["offload_optimizer"],
        **_kernels(settings),
    )  # fmt: skip
    case = settle(
        Case(
            model=model, layout=layout, sequence_length=length, global_batch_size=total, world=world
        ).with_accumulation_steps()
    )  # fmt: skip
    _write_derived(settings, case, settle)
    check_legal(
        model, case.layout, length, global_batch_size=total, world=world, settle=settle,
        origins={k: s.origin for k, s in settings.items()},
    )  # fmt: skip
    return case.layout


def _kernels(settings: Settings) -> dict[str, Any]:
    """The section, with fusions by name."""
    kernels = _section(settings, "kernels")
    named: Mapping[object, tuple[Fusion, ...]] = {"none": (), "all": FUSIONS}
    return kernels | {"fuse": named.get(kernels["fuse"], kernels["fuse"])}


def _write_derived(settings: Settings, case: Case, settle: Settle) -> None:
    lay, total = case.layout, case.global_batch_size
    if "dp" in settle.open:
        if case.world is not None:
            why = f"derived: {case.world} / ({lay.tp}·{lay.pp}·{lay.cp})"
        else:
            why = f"derived: the least that ep = {lay.ep} needs" if lay.ep > 1 else "default"
        settings["parallel.dp"] = Setting(lay.dp, why)
    if "micro_batch_size" in settle.open:
        why = f"derived: at most {settle.largest_micro_batch}, a divisor of {total} / {lay.dp}"
        settings["batch.micro_batch_size"] = Setting(lay.micro_batch_size, why)
    settings["batch.gradient_accumulation_steps"] = Setting(
        lay.gradient_accumulation_steps, f"derived: {total} / ({lay.dp}·{lay.micro_batch_size})"
    )


def _precision(settings: Settings) -> None:
    """Replace "auto" by the recipe's values."""
    given = Precision(**_section(settings, "precision"))
    for f in fields(given):
        key, whole = f"precision.{f.name}", Precision.of(given.policy)
        if getattr(given, f.name) == "auto" and f.name != "device":
            follows = key == "precision.reduce" and given.gradient != "auto"
            origin = "derived: precision.gradient" if follows else f"derived: recipe {given.dtype}"
            settings[key] = Setting(getattr(whole, f.name), origin)


def _check_sections(run: RunSpec, settings: Settings) -> None:
    """Refuse sections that contradict each other."""
    moe = run.model.moe
    if run.optimizer.kind == "muon" and run.layout.offload_optimizer:
        raise BadInput(
            "OFFLOAD", "Muon updates whole matrices on the device; only AdamW's states can be on the host",
            where=f"memory.offload_optimizer ({settings['memory.offload_optimizer'].origin})",
            found="optimizer.kind muon", allowed="adamw",
            fix="--optimizer.kind adamw, or --memory.offload_optimizer false",
        )  # fmt: skip
    if run.tokenizer == "bytes" and run.model.vocab_size < _BYTES:
        raise BadInput(
            "VOCAB", "the byte tokenizer needs a row for each byte and one for the end of a document",
            where=f"model.vocab_size ({settings['model.vocab_size'].origin})", found=run.model.vocab_size,
            allowed=f"{_BYTES} or more", fix="--model.vocab_size 264",
        )  # fmt: skip
    if moe and any(layer >= run.model.layers for layer in moe.dense_layers):
        raise BadInput(
            "VALUE", "names layers that the model does not have",
            where=f"model.moe.dense_layers ({settings['model.moe.dense_layers'].origin})",
            found=", ".join(map(str, moe.dense_layers[:8])), allowed=f"0 to {run.model.layers - 1}",
        )  # fmt: skip
