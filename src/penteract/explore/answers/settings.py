"""The present value of each control, what else it may be, and which rule another value would break."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from penteract.config.catalog.hardware import tables
from penteract.config.files.keys import keys
from penteract.config.layout import Layout
from penteract.config.optimizers import OPTIMIZERS
from penteract.config.precision.policy import RECIPES
from penteract.config.rules.breaches import breaches
from penteract.config.rules.case import Case
from penteract.config.rules.determinism import not_seen_to_repeat
from penteract.config.rules.kernel_gpus import for_other_gpus
from penteract.config.rules.without_effect import why_without_effect
from penteract.explore.answers.controls import WORDS, key_of, leaf, names, word
from penteract.explore.answers.questions import DEGREES, Asked
from penteract.explore.schemas.page_schema import ControlChoice, ControlSetting, Question, Value
from penteract.planner.ask import as_settings
from penteract.planner.plan import case_of
from penteract.planner.space.layouts import divisors
from penteract.planner.space.legality import CROSSES, crosses_node

_POWERS = tuple(2**n for n in range(11))
_PART_EMPTY = "the last node would be part empty"
_LENGTHS = tuple(2**n for n in range(8, 21))
_MOST_CHUNKS = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a question. `case`: its layout with what is open filled; legal or not."""

    asked: Asked
    case: Case

    def all(self) -> dict[str, ControlSetting]:
        """Every control by name."""
        return {name: self._setting(name) for name in names()}

    def _setting(self, name: str) -> ControlSetting:
        page, setting, lay = self.asked.page, leaf(name), self.case.layout
        if name.startswith("layout."):
            now = _effective(lay, setting) if setting not in page["layout"] else page["layout"][setting]
            chosen = setting in page["layout"]
        elif name.startswith("parts."):
            now, chosen = page["parts"].get(setting, "auto"), setting in page["parts"]
        else:
            now, chosen = _own(page, name), True
        values = [now] if name == "model" else [*self._values(name, now)]
        return {
            "value": now, "text": word(setting, now), "chosen": chosen, "idle": self._idle(setting),
            "choices": [self._choice(name, setting, value) for value in values] if name != "model" else [],
        }  # fmt: skip

    def _choice(self, name: str, setting: str, value: Value) -> ControlChoice:
        return {"value": value, "text": word(setting, value), "why_not": self._why_not(name, setting, value)}

    def _values(self, name: str, now: Value) -> Iterable[Value]:
        """The values to choose from, with the present one. Degrees and sizes ascend."""
        setting = leaf(name)
        if setting in WORDS:
            return dict.fromkeys((*WORDS[setting], now))
        if name == "sequence_length":
            most = max(self.case.model.max_positions, int(now))
            return sorted({*(n for n in _LENGTHS if n <= most), int(now)})
        if name == "global_batch_size":
            return sorted({*(2**n for n in range(13)), int(now)})
        if (sizes := self._sizes(setting)) and isinstance(now, int):
            return sorted({*sizes, now})
        if name == "gpu":
            return tables("gpus")
        if name == "precision":
            return RECIPES
        if name == "optimizer":
            return OPTIMIZERS
        if name.startswith("parts."):
            return dict.fromkeys(("auto", *_literals(keys()[key_of(name)].hint)))
        return ()

    def _sizes(self, setting: str) -> tuple[int, ...]:
        """Sizes that a slider stops at."""
        m, lay = self.case.model, self.case.layout
        whole = {
            "dp": _POWERS,
            "tp": tuple(n for n in sorted({*_POWERS[:4], *divisors(m.heads)}) if n <= min(m.heads, 64)),
            "pp": tuple(n for n in _POWERS if n <= min(m.layers, 128)),
            "cp": _POWERS[:7],
            "ep": divisors(m.moe.experts) if m.moe else (1,),
            "expert_tp": tuple(sorted({1, lay.tp})),
            "last_stage_less_layers": tuple(range(min(9, m.layers))),
            "vpp": tuple(range(1, min(_MOST_CHUNKS, max(1, m.layers // max(1, lay.pp))) + 1)),
        }
        if setting == "micro_batch_size":
            share = (self.case.global_batch_size or 1) // max(1, lay.dp)
            return tuple(n for n in divisors(max(1, share)) if n <= 64)
        return whole.get(setting, ())

    def _why_not(self, name: str, setting: str, value: Value) -> str:
        """The rule that a value would break; empty if none, or if another setting is at fault already."""
        if name in ("sequence_length", "global_batch_size"):
            found = breaches(replace(self.case.put(name, value), world=None))
            now = {at for at, _ in breaches(replace(self.case, world=None))}
            return next((what for at, what in found if at not in now or at == name), "")
        if not name.startswith("layout.") or not (isinstance(value, int) or setting in _RULED):
            return ""
        lay, cluster = self.case.layout, self.asked.ask.cluster
        ask = self.asked.ask
        case, _ = case_of(
            ask, {**self.asked.settings, setting: (value,)}
        )  # defaults may depend on it: the attention kernel
        world, node = case.layout.world, cluster.gpus_per_node
        if setting in DEGREES:
            case = case.put("world", world)
            full = max(node, self._node)
            if world > full and world % full:
                return _PART_EMPTY
            if not ask.tp_across_nodes and crosses_node(case.layout.tp, world, min(world, full)):
                return CROSSES
        if setting in _KERNELS and ask.cluster.gpu is not None:
            for other in for_other_gpus(case.model, case.layout, ask.cluster.gpu.capability):
                if other.setting == setting:
                    return f"{other.what} is for other GPUs"
        if setting in _REPEATED and ask.gpu is not None:
            for seen in not_seen_to_repeat(case.model, case.layout, ask.gpu.capability):
                return f"not seen to repeat to the bit: {seen.found}"
        found = breaches(case if setting in DEGREES else replace(case, world=None))
        at_fault = {at for at, _ in breaches(self.case)} if found else set[str]()
        new = [what for at, what in found if at not in at_fault or at == setting]
        return new[0] if new and (lay != case.layout or setting in at_fault) else ""

    @property
    def _node(self) -> int:
        gpu = self.asked.ask.cluster.gpu
        return int(tables("nodes")[gpu.name]["gpus_per_node"]) if gpu else 1

    def _idle(self, setting: str) -> str:
        """Why a control changes nothing with the other settings; empty if it may."""
        if setting == "tp_across_nodes" and self.asked.ask.cluster.gpus <= self._node:
            return "there is one node"
        return why_without_effect(setting, self.case.model, self.case.layout)


_KERNELS = ("attention", "experts", "fuse")  # of which some are for some GPUs
_REPEATED = ("determinism", "elementwise", "experts")  # on which it depends whether a run repeats on a GPU
_RULED = (
    "schedule", "cp_method", "ep_method", "expert_rows", "attention", "loss", "elementwise", "experts", "collectives",
    "determinism", "zero", "fuse",
)  # fmt: skip


def _own(page: Question, name: str) -> Value:
    """A value outside of the layout."""
    if name == "model":
        return page["model"]["name"]
    return cast("Mapping[str, Value]", page)[name]


def _effective(layout: Layout, setting: str) -> Value:
    """The value of a setting, as `--layout` writes it."""
    named = as_settings(layout)
    if setting in named:
        return named[setting]
    value = getattr(layout, setting)
    return value if isinstance(value, bool | int | str) else {"offload": "nothing"}.get(setting, "none")


def _literals(hint: Any) -> tuple[Any, ...]:
    """The words of a type of words."""
    inner = get_args(hint)
    return tuple(word for one in inner for word in (_literals(one) or ((one,) if isinstance(one, str) else ())))
