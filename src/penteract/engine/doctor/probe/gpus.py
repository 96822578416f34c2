"""GPUs from the first source that answers: nvidia-ml-py, nvidia-smi, or torch, which has less information."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penteract.engine.doctor.machine import Gpus, GpuState, Torch
from penteract.engine.doctor.probe import smi
from penteract.engine.doctor.probe.child import ask

DRIVER = Path("/proc/driver/nvidia/version")
LONGEST_S = 20.0  # a broken driver may not answer at all


def gpus(torch: Torch | None) -> Gpus:
    """The GPUs from NVML, else from nvidia-smi, else from torch; `why`: why a better source did not answer."""
    loaded, why = DRIVER.exists(), ""
    if find_spec("pynvml") is not None:
        fields = ask("penteract.engine.doctor.probe.nvml", seconds=LONGEST_S)
        if not fields.get("error"):
            return Gpus(**_values(fields), source="nvidia-ml-py", loaded=loaded)
        why = f"nvidia-ml-py: {fields['error']}"
    if shutil.which("nvidia-smi"):
        fields = smi.answer(seconds=LONGEST_S)
        if not fields.get("error"):
            return Gpus(**_values(fields), source="nvidia-smi", loaded=loaded, why=why)
        why = "; ".join(filter(None, (why, f"nvidia-smi: {fields['error']}")))
    why = why or ("nvidia-ml-py and nvidia-smi are absent" if loaded or (torch and torch.devices) else "")
    if torch and torch.devices:
        return _by_torch(torch, loaded, why)
    return Gpus(loaded=loaded, why=why)


def _values(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of Gpus from JSON: lists become tuples, and a GPU's fields a GpuState."""
    devices = tuple(GpuState(**{k: _tuples(v) for k, v in device.items()}) for device in fields["devices"])
    return {**fields, "devices": devices, "matrix": _tuples(fields.get("matrix"))}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _by_torch(torch: Torch, loaded: bool, why: str) -> Gpus:
    """The GPUs that torch sees, in torch's numbering."""
    devices = tuple(
        GpuState(index=i, name=d.name, uuid=d.uuid, memory=d.memory, free=d.free, capability=d.capability)
        for i, d in enumerate(torch.devices)
    )
    ways = tuple(
        tuple("X" if i == j else "P2P" if able else "-" for j, able in enumerate(row))
        for i, row in enumerate(torch.peers)
    )
    return Gpus(source="torch", why=why, loaded=loaded, devices=devices, matrix=ways)
