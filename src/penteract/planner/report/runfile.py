"""A layout as a run file that `penteract train` loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penteract.config.files.keys import keys
from penteract.config.layout import Layout
from penteract.config.resolve.presets import preset
from penteract.config.resolve.resolved_run import Resolved
from penteract.config.resolve.write_run_file import to_toml
from penteract.config.rules.kernel_limits import takes_documents
from penteract.config.run import Checkpoint, Data, LearningRateSchedule, Optimizer, Precision, RunSpec
from penteract.errors import BadInput
from penteract.planner.ask import Ask
from penteract.units import Seconds, show_whole

_BETWEEN_SAVES = 1800.0  # seconds: so much training may be lost

_HEAD = """\
# A planned run: every value, and where it came from. Train it:
#   penteract train {name}
"""


def run_file(ask: Ask, layout: Layout, step: Seconds, name: str = "run.toml", *, background: bool = True) -> str:
    """The run file called `name`: the model in full, the layout and batch of the plan, learning rates if a preset has
    them, and a checkpoint about every half an hour.

    step        what is planned for one
    background  whether hosts have room for saves in the background
    """
    return to_toml(as_run(ask, layout, step, background=background), _HEAD.format(name=name))


def left_open(path: object, ask: Ask, layout: Layout, step: Seconds) -> str:
    """A line about what a plan does not decide: data, tokenizer and the number of steps are placeholders."""
    run = as_run(ask, layout, step).run
    every = f"{show_whole(run.checkpoint.every)} steps" if run.checkpoint.every > 1 else "step"
    saves = f" A checkpoint is saved every {every} (checkpoint.every), about half an hour as planned."
    text = " (Python's library)" if run.data.source == "builtin" else ""
    return (
        f"Before training, edit {path}: training.steps = {run.train.steps}, "
        f'data.source = "{run.data.source}"{text} and tokenizer.source = "{run.tokenizer}" are placeholders.{saves}'
    )


def as_run(ask: Ask, layout: Layout, step: Seconds | None = None, *, background: bool = True) -> Resolved:
    """The run, with the plan as the origin of what it decided. `step`: seconds of one; None: it is not saved before its
    end."""
    suits = _suiting(ask)
    run = RunSpec(
        model=ask.model,
        layout=layout,
        sequence_length=ask.sequence_length,
        precision=Precision.of(ask.precision),
        data=Data(pack_documents=takes_documents(layout.attention)),
        optimizer=replace(Optimizer(kind=ask.optimizer), **_of(suits, "optimizer")),
        lr_schedule=replace(LearningRateSchedule(), **_of(suits, "learning_rate")),
        checkpoint=Checkpoint(asynchronous=background, every=max(1, round(_BETWEEN_SAVES / step)) if step else 0),
    )
    plan = f"plan for {ask.cluster.name}"
    decided = [key for key in keys() if key.startswith(("parallel.", "batch.", "memory.", "kernels.", "precision."))]
    model = {key: ask.model.name for key in keys() if key.startswith("model.")}
    decided += ["data.pack_documents"] * (not takes_documents(layout.attention)) + ["optimizer.kind"]
    decided += ["checkpoint.asynchronous"] * (not background) + ["checkpoint.every"] * (step is not None)
    return Resolved(run=run, origins={**model, **dict.fromkeys(decided, plan), **dict.fromkeys(suits, ask.model.name)})


def _suiting(ask: Ask) -> Mapping[str, object]:
    """The optimizer settings of the preset of this model; none for another model of the same name."""
    try:
        found = preset(ask.model.name)
    except BadInput:
        return {}
    if found.model != ask.model:
        return {}
    return {k: v for k, v in found.settings.items() if k.startswith(("optimizer.", "learning_rate."))}


def _of(settings: Mapping[str, object], section: str) -> dict[str, Any]:
    return {k.removeprefix(f"{section}."): v for k, v in settings.items() if k.startswith(f"{section}.")}
