"""What a run with default options would use here."""

from __future__ import annotations

from collections.abc import Iterator

from penteract.engine.doctor.finding import Finding, count
from penteract.engine.doctor.machine import HostReport

AREA = "a run"
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # those of `engine/device/device.py`; a test compares them


def findings(machine: HostReport) -> Iterator[Finding]:
    """Device, backend, ranks and threads of a run; and GPUs that would be idle."""
    torch, use = machine.torch, machine.use
    if torch is None or torch.error:
        return  # the software is bad
    if not torch.device:
        yield Finding(AREA, "torch names no device", "bad", "python -c 'import torch' shows more")
        return
    ranks = count(use.ranks, "rank")
    on = "on the CPU" if torch.device == "cpu" else f"on {count(use.ranks, 'GPU')}"
    spare = len(torch.devices) - use.ranks if torch.device == "cuda" else 0
    if spare < 0:
        what = f"{ranks} for {count(len(torch.devices), 'GPU')}"
        yield Finding(AREA, what, "bad", f"torchrun --nproc-per-node {len(torch.devices)}, or --precision.device cpu")
        return
    backend = f"backend {BACKENDS[torch.device]}" if use.ranks > 1 else "no collectives"
    yield Finding(AREA, f"penteract train: {ranks} {on}, {backend}, {count(use.threads, 'CPU thread')} a rank")
    if spare > 0:
        what = f"{count(spare, 'GPU')} would stay idle: a run has one rank unless its layout says more"
        yield Finding(AREA, what, "note", f"penteract train --parallel.dp {len(torch.devices)}")
