"""Settings of experts that follow others: how tokens get to them, and the size of registers of their rows."""

from __future__ import annotations

from penteract.config.files.keys import keys
from penteract.config.files.read import Setting, Settings
from penteract.config.layout import EpMethod
from penteract.config.model import ModelSpec
from penteract.config.rules.ep_methods import lighter_ep_method

# Keys that files with one method do not have.
_YOUNGER = ("parallel.ep_method", "parallel.expert_rows", "parallel.capacity_percent")
_ROWS = "parallel.expert_rows"
# What padded rows depend on: with another of these they may be illegal, or have other room.
_OF_ROWS = {"parallel.ep", "parallel.ep_method", "parallel.expert_tp", "kernels.experts", "precision.dtype",
            "precision.fp8_experts"}  # fmt: skip


def follow(settings: Settings, layers: list[Settings], model: ModelSpec) -> None:
    """If the command line sets another ep, the method that the file's had by default is that of the new one. If it sets
    anything that padded rows of a file depend on, their size is open again."""
    *files, flags = layers
    if flags.keys() & _OF_ROWS and _ROWS not in flags and any(_ROWS in one for one in files):
        settings[_ROWS] = Setting(keys()[_ROWS].default, "default")
    if "parallel.ep" not in flags or "parallel.ep_method" in flags:
        return
    before = next((one["parallel.ep"].value for one in reversed(files) if "parallel.ep" in one), 1)
    if settings["parallel.ep_method"].value == lighter_ep_method(model, before):
        ep = flags["parallel.ep"].value
        settings["parallel.ep_method"] = Setting(lighter_ep_method(model, ep), f"derived: ep = {ep}")


def ep_method(settings: Settings, model: ModelSpec) -> EpMethod:
    """As it is set, or by what sends less. A file that has all keys of its time was written when there was one
    method."""
    found = settings["parallel.ep_method"].value
    if found != "auto":
        return found
    ep, before = settings["parallel.ep"].value, [k for k in settings if k.startswith("parallel.") and k not in _YOUNGER]
    if all(settings[k].origin != "default" for k in before):
        method, why = "all_to_all", "that of runs from before this key"
    else:
        method, why = lighter_ep_method(model, ep), f"derived: ep = {ep}" if ep > 1 else "default"
    settings["parallel.ep_method"] = Setting(method, why)
    return method
