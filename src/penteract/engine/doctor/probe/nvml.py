"""GPUs through nvidia-ml-py, in a separate process.

    python -m penteract.engine.doctor.probe.nvml

prints one JSON object, fields of `machine.Gpus`. Values that a GPU or its driver does not support are None.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

SLOWED = {0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}
CORRECTED, UNCORRECTED, SINCE_START, GRAPHICS = 0, 1, 0, 0  # enumerations of NVML
READ, OK, MOST_LINKS = 0, 0, 36


def answer() -> dict[str, Any]:
    """Fields of Gpus; {"error": …} when the driver does not answer."""
    import pynvml  # pyright: ignore[reportMissingImports] - of an extra

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        return {"error": str(error)}
    ask = _asking(pynvml)
    devices = [_device(pynvml, ask, i, handle) for i, handle in enumerate(handles)]
    cuda = ask(pynvml.nvmlSystemGetCudaDriverVersion)
    return {
        "driver": ask(pynvml.nvmlSystemGetDriverVersion) or "",
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        "devices": devices,
        "matrix": _matrix(ask, pynvml, handles, [d["links"] for d in devices]),
    }


def _asking(pynvml: Any) -> Callable[..., Any]:
    def ask(question: Callable[..., Any], *words: Any) -> Any:
        """The result; None if this GPU or driver does not support the call, or the user lacks the permission."""
        try:
            return question(*words)
        except pynvml.NVMLError:
            return None

    return ask


def _device(pynvml: Any, ask: Callable[..., Any], index: int, handle: Any) -> dict[str, Any]:
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    ecc, mig = ask(pynvml.nvmlDeviceGetEccMode, handle), ask(pynvml.nvmlDeviceGetMigMode, handle)
    reasons = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    running = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    links = [ask(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(MOST_LINKS)]
    persistence = ask(pynvml.nvmlDeviceGetPersistenceMode, handle)
    return {
        "index": index,
        "name": ask(pynvml.nvmlDeviceGetName, handle) or "unknown",
        "uuid": ask(pynvml.nvmlDeviceGetUUID, handle) or "",
        "memory": memory and memory.total,
        "free": memory and memory.free,
        "capability": ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        "power": _watts(ask(pynvml.nvmlDeviceGetPowerUsage, handle)),
        "power_limit": _watts(ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        "power_default": _watts(ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
        "clock": ask(pynvml.nvmlDeviceGetClockInfo, handle, GRAPHICS),
        "clock_most": ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, GRAPHICS),
        "slowed": [name for bit, name in SLOWED.items() if reasons & bit],
        "ecc": bool(ecc[0]) if ecc else None,
        "corrected": ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, CORRECTED, SINCE_START),
        "uncorrected": ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, UNCORRECTED, SINCE_START),
        "remapping": _remapping(ask(pynvml.nvmlDeviceGetRemappedRows, handle)),
        "persistence": None if persistence is None else bool(persistence),
        "mig": bool(mig[0]) if mig else None,
        "processes": None if running is None else [(p.pid, p.usedGpuPeers) for p in running],
        "links": links.count(1) if any(s is not None for s in links) else None,
        "links_down": links.count(0) if any(s is not None for s in links) else None,
    }


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _remapping(rows: Any) -> str:
    """(corrected, uncorrected, pending, failed) as "failed", "pending" or ""."""
    return "" if rows is None else "failed" if rows[3] else "pending" if rows[2] else ""


def _matrix(ask: Callable[..., Any], pynvml: Any, handles: list[Any], links: list[int | None]) -> list[list[str]]:
    """How each GPU reaches each other one; see `machine.Gpus`.

    Through a switch, a pair has all the NVLinks of the GPU with fewer. On boards with direct links between pairs, a
    link belongs to the pair whose bus address is at its other end.
    """
    buses = [getattr(ask(pynvml.nvmlDeviceGetPciInfo, h), "busId", None) for h in handles]
    far = [[_far(ask(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, h, link)) for link in range(MOST_LINKS)] for h in handles]

    def way(i: int, j: int) -> str:
        if i == j:
            return "X"
        if not _reaches(ask, pynvml, handles[i], handles[j], READ):
            return "-"
        if not _reaches(ask, pynvml, handles[i], handles[j], pynvml.NVML_P2P_CAPS_INDEX_NVLINK):
            return "PCIe"
        wired = far[i].count(_text(buses[j]))
        return f"NV{wired or min(links[i] or 1, links[j] or 1)}"

    return [[way(i, j) for j in range(len(handles))] for i in range(len(handles))]


def _reaches(ask: Callable[..., Any], pynvml: Any, one: Any, other: Any, how: int) -> bool:
    return ask(pynvml.nvmlDeviceGetP2PStatus, one, other, how) == OK


def _far(info: Any) -> str:
    return _text(getattr(info, "busId", None))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


if __name__ == "__main__":
    print(json.dumps(answer()))
