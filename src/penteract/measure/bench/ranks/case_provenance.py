"""Where a measurement comes from: versions, commit, device, clocks and power."""

from __future__ import annotations

import os
import platform
import threading
from typing import Any

import torch

from penteract._version import __version__
from penteract.engine.doctor.machine import GpuState
from penteract.engine.doctor.probe.gpus import gpus
from penteract.measure.calibrate.measuring import git
from penteract.measure.schemas.sweep import CaseProvenance


def gpu_facts(device: torch.device, local: int) -> dict[str, Any]:
    """Of a rank's GPU, while it is hot: `clock_mhz`, `power_w`, `power_limit_w`, `driver`. Empty on a CPU."""
    if device.type != "cuda":
        return {}
    found = gpus(None)
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    state = next((d for d in found.devices if uuid and uuid in d.uuid), GpuState(index=local, name=""))
    return {
        "clock_mhz": state.clock,
        "power_w": state.power,
        "power_limit_w": state.power_limit,
        "driver": found.driver,
    }


class HotFacts:
    """`gpu_facts`, asked for while steps are under way: after them a GPU has cooled within a second."""

    def __init__(self, device: torch.device, local: int) -> None:
        self._found: dict[str, Any] = {}
        self._asking = threading.Thread(target=self._ask, args=(device, local), daemon=True)

    def ask(self) -> None:
        """In a thread of its own: the driver takes its time."""
        self._asking.start()

    def found(self) -> dict[str, Any]:
        """The facts; empty where nobody asked."""
        if self._asking.ident is not None:
            self._asking.join()
        return self._found

    def _ask(self, device: torch.device, local: int) -> None:
        self._found = gpu_facts(device, local)


def provenance(
    device: torch.device, began: str, ended: str, hosts: list[str], facts: list[dict[str, Any]], command: str
) -> CaseProvenance:
    """Of a case; `hosts` and `facts` (`gpu_facts`) by rank."""

    def of_ranks(name: str) -> tuple[Any, ...]:
        found = [one.get(name) for one in facts]
        return () if None in found else tuple(found)

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return CaseProvenance(
        versions=versions(device, str(facts[0].get("driver", ""))), commit=commit(), device=name,
        hosts=tuple(dict.fromkeys(hosts)), began=began, ended=ended, clock_mhz=of_ranks("clock_mhz"),
        power_w=of_ranks("power_w"), power_limit_w=of_ranks("power_limit_w"), command=command,
    )  # fmt: skip


def versions(device: torch.device, driver: str) -> dict[str, str]:
    """Of what computes."""
    found = {"penteract": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if device.type != "cuda":
        return found | {"threads": str(torch.get_num_threads()), "cores": str(os.cpu_count() or "")}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # pyright: ignore[reportAttributeAccessIssue] - not in its stub
    found |= {"cuda": torch.version.cuda or "", "cudnn": str(torch.backends.cudnn.version()), "nccl": nccl}
    return found | ({"driver": driver} if driver else {})


def commit() -> str:
    """The commit of the package, with -dirty if its sources were changed; empty outside of a repository."""
    found = git("rev-parse", "--short", "HEAD")
    return found + ("-dirty" if found and git("status", "--porcelain", "--", ".") else "")


def processor() -> str:
    """The name of the processor, as Linux has it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, "cpu")
    except OSError:
        return "cpu"
