"""The torch that a run would load, examined in a separate process: its versions, and whether each GPU can add.

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

LONGEST_S = 90.0  # the first start on a host with many GPUs reads gigabytes


def torch() -> Torch | None:
    """The installed torch; None if there is none."""
    if find_spec("torch") is None:
        return None
    fields = ask(__name__, seconds=LONGEST_S)
    devices = tuple(
        TorchDevice(**device | {"capability": tuple(device["capability"])}) for device in fields.pop("devices", ())
    )
    peers = tuple(tuple(row) for row in fields.pop("peers", ()))
    fields["archs"] = tuple(fields.get("archs", ()))
    return Torch(**fields, devices=devices, peers=peers)


def answer() -> dict[str, Any]:
    """Fields of Torch. Imports torch."""
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl

    fields: dict[str, Any] = {
        "version": torch.__version__, "cuda": torch.version.cuda or "", "hip": torch.version.hip or "",
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "has_nccl": dist.is_available() and dist.is_nccl_available(), "threads": torch.get_num_threads(),
    }  # fmt: skip
    if fields["has_nccl"]:
        fields["nccl"] = ".".join(map(str, nccl.version()))
    if (cudnn := torch.backends.cudnn.version()) is not None:
        fields["cudnn"] = f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fields["available"] = torch.cuda.is_available()
        count = torch.cuda.device_count() if fields["available"] else 0
        fields["devices"] = [_device(i) for i in range(count)]
    fields["archs"] = torch.cuda.get_arch_list() if fields["available"] else []
    fields["reason"] = " ".join(" ".join(str(w.message) for w in caught).split())[:400]
    fields["peers"] = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
    return fields | _engine()


def _device(i: int) -> dict[str, Any]:
    import torch

    fields: dict[str, Any] = {"name": "", "memory": 0, "capability": (0, 0)}
    try:
        of = torch.cuda.get_device_properties(i)
        fields = {"name": of.name, "memory": of.total_memory, "capability": (of.major, of.minor),
                "uuid": str(getattr(of, "uuid", ""))}  # fmt: skip
        total = int(torch.arange(1000, device=f"cuda:{i}").sum())
        fields["works"] = "" if total == 499500 else f"0 + 1 + ... + 999 gave {total}"
        fields["free"] = torch.cuda.mem_get_info(i)[0]
    except Exception as error:  # a broken device may raise anything: that is the result
        fields["works"] = " ".join(str(error).split())[:200]
    return fields


def _engine() -> dict[str, Any]:
    """The device that the engine picks for precision.device = auto."""
    try:
        from penteract.engine.device.device import pick_device

        return {"device": pick_device("auto", 0).type}
    except Exception as error:
        return {"device": "", "error": " ".join(str(error).split())[:300]}


if __name__ == "__main__":
    print(json.dumps(answer()))
