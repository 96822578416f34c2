"""The line of a run that had no memory left: which owner holds what, and the smallest changes that fit, with prices."""

from __future__ import annotations

import re

from penteract.config.hardware import Cluster, cluster
from penteract.config.run import RunSpec
from penteract.errors import OutOfMemory, PenteractError
from penteract.measure.profile.prediction import ask_of_run, estimator_of
from penteract.planner.ask import as_settings
from penteract.planner.plan import estimator, plan_one
from penteract.planner.report.smaller_layouts import smaller
from penteract.units import show_bytes

_CURVES = "1xH200"  # where the device has no curves, prices are ratios of its
_LESS = 0.9  # of the present bytes, where nothing tells how many there are
_MOST = 3


def out_of_memory_line(line: str, run: RunSpec, limit: int = 0, gpus: str | None = None) -> str:
    """The error line of a rank, with owners and changes. `limit`: bytes that a rank may take; 0: those that the line
    allows, if it does. Where the run cannot be planned, the line stays as it is."""
    try:
        return str(explained(line, run, limit or _allowed(line), _cluster(run, gpus)))
    except PenteractError:
        return line


def explained(line: str, run: RunSpec, limit: int, found: Cluster) -> OutOfMemory:
    """The error of the line, explained."""
    plan = plan_one(ask_of_run(run, found), {k: (v,) for k, v in as_settings(run.layout).items()}, estimator)
    need, memory = plan.best.estimate.allocated, plan.best.estimate.memory
    most = min(limit, need) if limit and need > limit else int(_LESS * need)
    owners = ", ".join(f"{owner} {show_bytes(n)}" for owner, n in sorted(memory.items(), key=lambda kn: -kn[1]) if n)
    some = smaller(plan, most)[:_MOST]
    basis = "" if found.curves is not None or gpu_named(run) else f" by curves of {_CURVES}"
    texts = [f"{one.keys} ({show_bytes(one.allocated)}, {one.price:+.0%} of a step{basis})" for one in some]
    what = line.removeprefix("error[MEMORY]: ").split(" · ")[0]
    return OutOfMemory(
        "MEMORY", what, found=f"planned for the fullest rank: {owners}",
        allowed=show_bytes(limit) if limit else "", fix=" or ".join(texts) or "more ranks, or shorter sequences",
    )  # fmt: skip


def _allowed(line: str) -> int:
    """The bytes that an error line allows, as `show_bytes` wrote them; 0 if it allows none."""
    found = re.search(r"allowed ([\d.]+) ([KMGT]iB|B)\b", line)
    return int(float(found[1]) * 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(found[2])) if found else 0


def gpu_named(run: RunSpec) -> bool:
    """Whether the run asks for GPUs."""
    return run.precision.device == "cuda"


def _cluster(run: RunSpec, gpus: str | None) -> Cluster:
    return estimator_of(run, cluster(gpus or _CURVES)).cluster
