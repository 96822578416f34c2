"""A question of the page as a question to the planner. The page is not trusted: everything is checked."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from penteract.config import catalog
from penteract.config.hardware import HEADROOM, gpu
from penteract.config.hf import model_from_hf
from penteract.config.model import ModelSpec
from penteract.config.recompute import name_of
from penteract.config.resolve.presets import PRESETS
from penteract.errors import BadInput
from penteract.explore.schemas.page_values import ModelQuestion, Question, Value
from penteract.planner.ask import LAYOUT_SETTINGS, Ask, Values, as_word, fusions_word, parse_settings
from penteract.planner.question import question
from penteract.units import printable

DEGREES = ("dp", "tp", "pp", "cp")  # their product is the number of GPUs
_SHORT = {"micro_batch_size": "mbs"}
_LONGEST = 200  # of a text in a question
_SEPARATORS = frozenset(",=/")
# Keys of a question, with the type of each value.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "model": (dict,), "gpu": (str,), "sequence_length": (int,), "global_batch_size": (int,), "precision": (str,),
    "parts": (dict,), "optimizer": (str,), "headroom": (int, float), "tp_across_nodes": (bool,), "layout": (dict,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked question: `ask` and `settings` are what `penteract plan --layout` makes of `command`."""

    page: Question
    ask: Ask
    settings: Mapping[str, Values]

    @property
    def command(self) -> str:
        """The command line that asks the same."""
        layout = self.page["layout"]
        settings = [
            f"{_SHORT.get(name, name)}={as_word(layout[name])}" for name in LAYOUT_SETTINGS if _matters(name, layout)
        ]
        return self.command_with("--layout", ",".join(settings))

    def command_with(self, *more: str) -> str:
        """The command line of the question without its layout, with `more` words."""
        page = self.page
        model = "config.json" if "config" in page["model"] else page["model"]["name"]
        words = ["penteract", "plan", model, "--gpus", self.ask.cluster.name,
                 "--seq", str(page["sequence_length"]), "--batch", f"{page['global_batch_size']}seqs",
                 *more]  # fmt: skip
        words += ["--precision", page["precision"]] * (page["precision"] != "bf16")
        for name, value in page["parts"].items():
            words += [f"--precision.{name}", as_word(value)]
        words += ["--optimizer", page["optimizer"]] * (page["optimizer"] != "adamw")
        words += ["--headroom", str(page["headroom"])] * (page["headroom"] != HEADROOM)
        words += ["--tp-across-nodes"] * page["tp_across_nodes"]
        return shlex.join(words)


def _matters(name: str, layout: Mapping[str, Value]) -> bool:
    """Whether a setting is in the command: dp and the micro-batch always, other degrees unless they are 1."""
    if name in ("dp", "micro_batch_size"):
        return name in layout
    return name in layout and not (name in (*DEGREES, "ep") and layout[name] == 1)


def opening_question(
    model: ModelQuestion,
    device: str = "H200",
    layout: str = "dp=8,mbs=2,zero=1",
    *,
    sequence_length: int | None = None,
    global_batch_size: int = 128,
    precision: str = "bf16",
) -> Question:
    """The question that a page opens with. Raises BadInput for texts that the command line refuses too."""
    m = model_of(model)
    settings = {
        name: _plain(name, values[0]) for name, values in parse_settings(layout, flag="--layout", several=False).items()
    }
    degrees = {name: settings.pop(name, 1) for name in DEGREES}
    return {
        "model": model,
        "gpu": gpu(device).name,
        "sequence_length": min(8192, m.max_positions) if sequence_length is None else sequence_length,
        "global_batch_size": global_batch_size,
        "precision": precision,
        "parts": {},
        "optimizer": "adamw",
        "headroom": HEADROOM,
        "tp_across_nodes": False,
        "layout": {**degrees, "micro_batch_size": 1, **settings},
    }


def changed(page: Question, changes: Mapping[str, Any]) -> Question:
    """The question with other values of settings, of the sequence length, the batch, the GPU, or parts of precision
    (`parts.moments`)."""
    new: Question = {**page, "layout": dict(page["layout"]), "parts": dict(page["parts"])}
    for name, value in changes.items():
        if name.startswith("parts."):
            new["parts"][name.removeprefix("parts.")] = value
        elif name in ("sequence_length", "global_batch_size", "gpu"):
            new[name] = value
        else:
            new["layout"][name] = _plain(name, value)
    return new


def _plain(setting: str, value: Any) -> Value:
    """A value of a setting as JSON: words of a list as one text."""
    if isinstance(value, tuple) and setting == "fuse":
        return fusions_word(cast("tuple[str, ...]", value))
    if isinstance(value, tuple):
        named = name_of(cast("tuple[str, ...]", value))
        return named if isinstance(named, str) else "+".join(named) or "none"
    return value


def read_question(given: object) -> Asked:
    """A question of the page, checked. Raises BadInput, as the command line does for the same mistake."""
    page = _typed(given)
    settings = _settings_of(page["layout"])
    world = prod(int(settings.get(name, (1,))[0]) for name in DEGREES)
    ask = question(
        model_of(page["model"]), f"{world}x{gpu(page['gpu']).name}", sequence_length=page["sequence_length"],
        batch=f"{page['global_batch_size']}seqs", precision=page["precision"], parts=_parts(page["parts"]),
        optimizer=page["optimizer"], headroom=float(page["headroom"]), tp_across_nodes=page["tp_across_nodes"],
    )  # fmt: skip
    return Asked(page, ask, settings)


def _typed(given: object) -> Question:
    """The question with exactly its keys, each of its type."""
    if not isinstance(given, dict):
        raise _wrong("question", given, "an object")
    tree = cast("dict[str, Any]", given)
    for name, types in _TYPES.items():
        value = tree.get(name)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise _wrong(f"question.{name}", value, " or ".join(t.__name__ for t in types))
        if isinstance(value, str):
            _check_text(f"question.{name}", value)
    if unknown := tree.keys() - _TYPES.keys():
        raise _wrong("question", min(map(str, unknown)), ", ".join(_TYPES))
    for section in ("parts", "layout"):
        for name, value in tree[section].items():
            if not isinstance(value, bool | int | float | str):
                raise _wrong(f"question.{section}.{name}", value, "a number, a text, true or false")
            if isinstance(value, str):
                _check_text(f"question.{section}.{name}", value)
    return cast("Question", tree)


def _check_text(where: str, value: str) -> None:
    if len(value) > _LONGEST or not value.isprintable():
        raise _wrong(where, printable(value, 40), f"up to {_LONGEST} printable characters")


def _settings_of(layout: Mapping[str, Value]) -> dict[str, Values]:
    """The settings, read as `--layout` reads them: so they are refused alike."""
    found = dict[str, Values]()
    for name, value in layout.items():
        text = as_word(value)
        if _SEPARATORS & {*str(name), *text} or isinstance(value, float):
            raise _wrong(f"question.layout.{printable(str(name), 40)}", printable(text, 40), "one value")
        found |= parse_settings(f"{name}={text}", flag="--layout", several=False)
    return found


def model_of(given: Mapping[str, Any]) -> ModelSpec:
    """The model of a question: a published one, or that of a config.json's content."""
    name, config = given.get("name"), given.get("config")
    if given.keys() - {"name", "config"} or not isinstance(name, str) or not name:
        raise _wrong("question.model", "another object", "name, or name and config")
    _check_text("question.model.name", name)
    if config is None:
        return find_published(name)
    if not isinstance(config, dict):
        raise _wrong("question.model.config", type(config).__name__, "the content of a config.json")
    return model_from_hf(cast("dict[str, Any]", config))


def find_published(name: str) -> ModelSpec:
    """A published model by name. The page names no files: a path is not looked at."""
    preset = PRESETS.get(name)
    return preset.model if preset else catalog.model(name)


def _parts(parts: Mapping[str, Value]) -> dict[str, Any]:
    """Keys of `[precision]`; what the recipe says is left to it."""
    return {name: value for name, value in parts.items() if value != "auto"}


def _wrong(where: str, found: object, allowed: str) -> BadInput:
    shown = found if isinstance(found, str) else type(found).__name__ if found is not None else "nothing"
    return BadInput("QUESTION", "not a question of this page", where=where, found=shown, allowed=allowed)
