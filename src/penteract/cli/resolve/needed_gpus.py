"""Which settings of a run are for GPUs, and the refusal of such a run where there are none."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

from penteract.cli.resolve.card_cluster import Card
from penteract.config.files.machine_file import machine_named
from penteract.config.resolve.resolved_run import Resolved
from penteract.config.rules.expert_kernels import EXPERTS
from penteract.config.rules.kernel_limits import ATTENTION
from penteract.config.run import RunSpec
from penteract.errors import BadInput


def settings_for_gpus(run: RunSpec) -> Mapping[str, tuple[str, str]]:
    """Keys whose value needs a GPU -> that value, and one that CPUs have too."""
    lay, found = run.layout, dict[str, tuple[str, str]]()
    if run.precision.device == "cuda":
        found["precision.device"] = "cuda", "cpu"
    attention, experts = ATTENTION.get(lay.attention), EXPERTS.get(lay.experts)
    if attention is not None and attention.device == "cuda":
        found["kernels.attention"] = lay.attention, "reference"
    if lay.elementwise != "reference":
        found["kernels.elementwise"] = lay.elementwise, "reference"
    if experts is not None and experts.device == "cuda" and run.model.moe is not None:
        found["kernels.experts"] = lay.experts, "reference"
    return found


def check_rates(run: RunSpec, card: Card | None, gpus: str) -> None:
    """Raise BadInput if a run is on CPUs, and `gpus` names GPUs of the catalogue, whose rates say nothing of it. A
    hardware file, and what `here` names, may be of CPUs. `card` and torch's last word: as in `check_gpus`."""
    if card is not None or gpus.lower().endswith(".toml") or machine_named(gpus) or settings_for_gpus(run):
        return
    if run.precision.device != "cpu":
        torch = import_module("penteract.engine.doctor.probe.torch").torch()
        if torch is None or torch.available or torch.error:
            return
    raise BadInput(
        "DEVICE", "these are rates of GPUs, and this run is on CPUs", where="--gpus", found=gpus,
        allowed="a hardware file of this machine, by penteract calibrate", fix="leave --gpus out",
    )  # fmt: skip


def check_gpus(resolved: Resolved, card: Card | None) -> None:
    """Raise BadInput if a run is for GPUs, and this host has none. `card`: the GPU that has answered already, if one
    has. Torch has the last word, as it has in ranks: a process of its own asks it, which takes seconds."""
    needs = settings_for_gpus(resolved.run)
    if card is not None or not needs or find_spec("torch") is None:  # who lacks torch is told that first
        return
    torch = import_module("penteract.engine.doctor.probe.torch").torch()
    if torch is None or torch.available or torch.error:  # what is wrong with torch, ranks say
        return
    first, settings = next(iter(needs)), ", ".join(f"{key} = {value}" for key, (value, _) in needs.items())
    plain = " ".join(f"--{key} {other}" for key, (_, other) in needs.items())
    why = torch.reason if torch.cuda or torch.hip else f"torch {torch.version}, built for CPUs alone"
    raise BadInput(
        "DEVICE", "this run is for GPUs, and there is none here", where=f"{first} ({resolved.origins[first]})",
        found=f"{settings}; {why or 'no GPU that torch can use'}",
        allowed=f"a GPU for each rank, {resolved.run.layout.world} in all",
        fix=f"train where GPUs are (penteract doctor says what a host has), or here on CPUs with {plain}",
    )  # fmt: skip
