"""How GPUs and hosts reach each other: NVLink, peer access, InfiniBand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from penteract.engine.doctor.finding import Finding, count, numbered
from penteract.engine.doctor.machine import GpuState, HostReport

AREA = "links"


def findings(machine: HostReport) -> Iterator[Finding]:
    """How the GPUs of the host are connected."""
    gpus = machine.gpus
    if len(gpus.devices) > 1:
        if gpus.matrix is None:
            what = "not known: how the GPUs reach each other"
            yield Finding(AREA, f"{what} ({gpus.why or 'no source for it'})", "note", "pip install nvidia-ml-py")
        else:
            yield from _between(gpus.matrix)
        yield from _lost(gpus.devices)
    yield from _fabric(machine)


def _between(matrix: Sequence[Sequence[str]]) -> Iterator[Finding]:
    """One finding if all pairs of GPUs are alike; else one for each kind of pair."""
    pairs = Counter(matrix[i][j] for i in range(len(matrix)) for j in range(i))
    for way, n in pairs.most_common():
        whose = "every pair of GPUs" if len(pairs) == 1 else f"{n} of {pairs.total()} pairs of GPUs"
        if way.startswith("NV"):
            yield Finding(AREA, f"{whose}: {count(int(way[2:] or 1), 'NVLink')}")
        elif way == "-":
            what = f"{whose}: no peer access, all traffic goes through the host's memory"
            yield Finding(AREA, what, "warn", "nvidia-smi topo -p2p r; iommu=off or the hypervisor's ACS settings")
        elif way == "PCIe":
            yield Finding(AREA, f"{whose}: peer access over PCIe, no NVLink", "note")
        else:
            fix = "pip install nvidia-ml-py"
            yield Finding(AREA, f"{whose}: peer access. Not known: over NVLink or PCIe", "note", fix)
    if len(pairs) > 1:
        what = "not all pairs of GPUs are alike: put tensor parallelism on those with the most links"
        yield Finding(AREA, what, "note", "nvidia-smi topo -m")


def _lost(devices: Sequence[GpuState]) -> Iterator[Finding]:
    """GPUs with fewer active NVLinks than others, or with inactive ones."""
    most = max((g.links or 0 for g in devices), default=0)
    if fewer := [g.index for g in devices if g.links is not None and g.links < most]:
        what = f"GPU {numbered(fewer)}: fewer NVLinks are up than the {most} of its neighbours"
        yield Finding(
            AREA, what, "warn", "nvidia-smi nvlink --status; a reset of the GPUs, or the fabric manager's log"
        )
    elif most == 0 and (down := [g.index for g in devices if g.links_down]):
        what = f"GPU {numbered(down)}: NVLinks are there, and all are down"
        yield Finding(AREA, what, "warn", "systemctl status nvidia-fabricmanager")


def _fabric(machine: HostReport) -> Iterator[Finding]:
    if not machine.ports:
        ways = ", ".join(machine.interfaces) or "none"
        yield Finding(AREA, f"no InfiniBand; network interfaces: {ways}", "note" if machine.gpus.devices else "ok")
        return
    up = [p for p in machine.ports if p.state == "ACTIVE"]
    rates = Counter(f"{p.layer} {p.rate}" for p in up)
    if up:
        shown = "; ".join(f"{n} x {kind}" for kind, n in rates.most_common())
        yield Finding(AREA, f"{count(len(up), 'active port')} between hosts: {shown}")
    if down := [p for p in machine.ports if p.state != "ACTIVE"]:
        names = ", ".join(f"{p.name} {p.state.lower()}" for p in down)
        yield Finding(AREA, f"ports that are not active: {names}", "note" if up else "warn", "ibstat")
