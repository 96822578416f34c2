"""The torch that a run would load, asked in a process of its own: its versions, and whether each GPU can add.

    python -m penteract.engine.doctor.probe.torch

prints one JSON object, the fields of `machine.Torch`.
"""

from __future__ import annotations

import json
import warnings
from importlib.util import find_spec
from typing import Any

from penteract.engine.doctor.machine import Torch, TorchDevice
from penteract.engine.doctor.probe.child import ask

LONGEST_S = 90.0  # a first start on a host with many GPUs reads gigabytes


def torch() -> Torch | None:
    """None when there is none."""
    if find_spec("torch") is None:
        return None
    told = ask(__name__, seconds=LONGEST_S)
    devices = tuple(
        TorchDevice(**device | {"capability": tuple(device["capability"])}) for device in told.pop("devices", ())
    )
    peers = tuple(tuple(row) for row in told.pop("peers", ()))
    told["archs"] = tuple(told.get("archs", ()))
    return Torch(**told, devices=devices, peers=peers)


def answer() -> dict[str, Any]:
    """Fields of Torch. Imports torch."""
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl

    told: dict[str, Any] = {
        "version": torch.__version__, "cuda": torch.version.cuda or "", "hip": torch.version.hip or "",
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "has_nccl": dist.is_available() and dist.is_nccl_available(), "threads": torch.get_num_threads(),
    }  # fmt: skip
    if told["has_nccl"]:
        told["nccl"] = ".".join(map(str, nccl.version()))
    if (cudnn := torch.backends.cudnn.version()) is not None:
        told["cudnn"] = f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        told["available"] = torch.cuda.is_available()
        count = torch.cuda.device_count() if told["available"] else 0
        told["devices"] = [_device(i) for i in range(count)]
    told["archs"] = torch.cuda.get_arch_list() if told["available"] else []
    told["reason"] = " ".join(" ".join(str(w.message) for w in said).split())[:400]
    told["peers"] = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
    return told | _engine()


def _device(i: int) -> dict[str, Any]:
    import torch

    told: dict[str, Any] = {"name": "", "memory": 0, "capability": (0, 0)}
    try:
        of = torch.cuda.get_device_properties(i)
        told = {"name": of.name, "memory": of.total_memory, "capability": (of.major, of.minor),
                "uuid": str(getattr(of, "uuid", ""))}  # fmt: skip
        total = int(torch.arange(1000, device=f"cuda:{i}").sum())
        told["works"] = "" if total == 499500 else f"0 + 1 + ... + 999 gave {total}"
        told["free"] = torch.cuda.mem_get_info(i)[0]
    except Exception as error:  # whatever a broken device does, it is the answer
        told["works"] = " ".join(str(error).split())[:200]
    return told


def _engine() -> dict[str, Any]:
    """What the engine itself would pick for precision.device = auto."""
    try:
        from penteract.engine.executor.device import pick_device

        return {"device": pick_device("auto", 0).type}
    except Exception as error:
        return {"device": "", "error": " ".join(str(error).split())[:300]}


if __name__ == "__main__":
    print(json.dumps(answer()))
