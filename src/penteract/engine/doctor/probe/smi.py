"""GPUs through the program nvidia-smi, for hosts without nvidia-ml-py."""

from __future__ import annotations

import re
import subprocess
from typing import Any

from penteract.units import MIB

# Of `nvidia-smi --help-query-gpu`: memory in MiB, power in W, clocks in MHz.
FIELDS = (
    "index", "name", "uuid", "driver_version", "memory.total", "memory.free", "compute_cap", "power.draw",
    "enforced.power.limit", "power.default_limit", "clocks.gr", "clocks.max.gr", "ecc.mode.current",
    "ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total", "persistence_mode",
    "mig.mode.current", "clocks_throttle_reasons.hw_slowdown", "clocks_throttle_reasons.sw_thermal_slowdown",
)  # fmt: skip
# Why clocks are lowered, where a field says "Active".
SLOWED = {"clocks_throttle_reasons.hw_slowdown": "hardware slowdown",
          "clocks_throttle_reasons.sw_thermal_slowdown": "heat (software)"}  # fmt: skip


def answer(*, seconds: float) -> dict[str, Any]:
    """Fields of `machine.Gpus` as JSON, after at most `seconds` a call; {"error": …} if nvidia-smi fails."""
    try:
        rows = _run(seconds, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
        running = _run(seconds, "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
        banner = _run(seconds)
        many = rows.count("\n") > 1
        topology, peers = (_run(seconds, "topo", *w) if many else "" for w in (("-m",), ("-p2p", "r")))
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {seconds:.0f} s"}
    except subprocess.CalledProcessError as error:
        return {"error": " ".join((error.stdout or error.stderr or "it failed").split())[:200]}
    return read(rows, running, banner, (topology, peers))


def read(rows: str, running: str, banner: str, topology: tuple[str, str]) -> dict[str, Any]:
    """Fields of `machine.Gpus` from what nvidia-smi prints: `rows` of --query-gpu, `running` of --query-compute-apps,
    the `banner` of a call without options, and `topology` (topo -m, topo -p2p r)."""
    gpus: list[dict[str, str]] = [
        dict(zip(FIELDS, _cells(line), strict=True)) for line in rows.splitlines() if line.strip()
    ]
    cuda = re.search(r"CUDA Version:\s*([0-9.]+)", banner)
    return {
        "driver": gpus[0]["driver_version"] if gpus else "",
        "cuda": cuda[1] if cuda else "",
        "devices": [_device(gpu, [_cells(line) for line in running.splitlines() if line.strip()]) for gpu in gpus],
        "matrix": _matrix(*topology, len(gpus)),
    }


def _matrix(links: str, peers: str, n: int) -> list[list[str]] | None:
    """How each GPU reaches each other one: NVLinks as printed (NV18); for other pairs, whether they have peer
    access."""
    link, peer = _square(links, n), _square(peers, n)
    if link is None or peer is None:
        return None

    def between(i: int, j: int) -> str:
        if i == j or link[i][j].startswith("NV"):
            return link[i][j]
        return "PCIe" if peer[i][j] == "OK" else "-"

    return [[between(i, j) for j in range(n)] for i in range(n)]


def _square(text: str, n: int) -> list[list[str]] | None:
    """Rows GPU0, GPU1, … of a printed topology, with X on the diagonal; None if there is none."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split()[1 : n + 1] for line in plain.splitlines() if re.match(r"\s*GPU[0-9]+\s", line)]
    rows = [row for row in rows if "X" in row]
    return rows if n > 1 and len(rows) == n and all(row[i] == "X" for i, row in enumerate(rows)) else None


def _device(row: dict[str, str], running: list[list[str]]) -> dict[str, Any]:
    """Fields of `machine.GpuState`: memory in bytes; None for what the GPU does not report. `running`: uuid, pid,
    MiB of each process on any GPU."""
    major, _, minor = row["compute_cap"].partition(".")
    return {
        "index": int(row["index"]),
        "name": row["name"],
        "uuid": row["uuid"],
        "memory": _bytes_of_mib(row["memory.total"]),
        "free": _bytes_of_mib(row["memory.free"]),
        "capability": [int(major), int(minor)] if major.isdigit() and minor.isdigit() else None,
        "power": _number(row["power.draw"]),
        "power_limit": _number(row["enforced.power.limit"]),
        "power_default": _number(row["power.default_limit"]),
        "clock": _whole(row["clocks.gr"]),
        "clock_most": _whole(row["clocks.max.gr"]),
        "slowed": [name for key, name in SLOWED.items() if row[key] == "Active"],
        "ecc": _switch(row["ecc.mode.current"]),
        "corrected": _whole(row["ecc.errors.corrected.volatile.total"]),
        "uncorrected": _whole(row["ecc.errors.uncorrected.volatile.total"]),
        "persistence": _switch(row["persistence_mode"]),
        "mig": _switch(row["mig.mode.current"]),
        "processes": [[int(pid), _bytes_of_mib(used)] for uuid, pid, used in running if uuid == row["uuid"]],
    }


def _run(seconds: float, *words: str) -> str:
    done = subprocess.run(
        ["nvidia-smi", *words], capture_output=True, text=True, errors="replace", timeout=seconds, check=True
    )
    return done.stdout


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _number(text: str) -> float | None:
    """A printed number; None for [N/A] and [Not Supported]."""
    try:
        return float(text)
    except ValueError:
        return None


def _whole(text: str) -> int | None:
    number = _number(text)
    return None if number is None else int(number)


def _bytes_of_mib(text: str) -> int | None:
    number = _number(text)
    return None if number is None else int(number * MIB)


def _switch(text: str) -> bool | None:
    return {"Enabled": True, "Disabled": False}.get(text)
