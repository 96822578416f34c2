"""Network adapters with RDMA, as Linux lists them: InfiniBand, RoCE, and EFA through its driver."""

from __future__ import annotations

from pathlib import Path

from penteract.engine.doctor.machine import Port

ADAPTERS = Path("/sys/class/infiniband")


def ports(folder: Path = ADAPTERS) -> tuple[Port, ...]:
    """All ports of all adapters. The kernel's texts are like "4: ACTIVE" and "400 Gb/sec (4X NDR)"."""
    return tuple(
        Port(
            name=f"{port.parent.parent.name}:{port.name}",
            state=_read(port / "state").rpartition(": ")[2],
            rate=_read(port / "rate").replace("Gb/sec", "Gbit/s"),
            layer=_read(port / "link_layer"),
        )
        for port in sorted(folder.glob("*/ports/*"))
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
