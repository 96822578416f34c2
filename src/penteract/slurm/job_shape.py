"""How many nodes a job takes, for how long, and what that costs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penteract.config.run import Slurm
from penteract.errors import BadInput
from penteract.units import Seconds, show_seconds, show_whole

_AUTO = "auto"
_TIME = re.compile(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?")


@dataclass(frozen=True, slots=True)
class JobShape:
    """`ranks` on `nodes`, the same number on each."""

    nodes: int
    ranks: int

    @property
    def on_a_node(self) -> int:
        """Ranks of each node."""
        return self.ranks // self.nodes


def job_shape(ranks: int, slurm: Slurm) -> JobShape:
    """The fewest nodes for `ranks`, all alike. Raises BadInput where whole nodes do not make them up."""
    most = slurm.ranks_per_node
    nodes = slurm.nodes if slurm.nodes != _AUTO else max(1, -(-ranks // most))
    if ranks % nodes or ranks // nodes > most:
        raise BadInput("NODES", f"{ranks} ranks do not fill {nodes} nodes evenly", where="slurm.ranks_per_node",
                       found=most, allowed=f"the layout's ranks on whole nodes of at most {most}",
                       fix="another dp, or --slurm.ranks_per_node with what a node has")  # fmt: skip
    return JobShape(nodes, ranks)


def seconds_of(time: str) -> Seconds | None:
    """Slurm's `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours[:minutes[:seconds]]`; None for auto.
    Raises BadInput."""
    if time == _AUTO:
        return None
    found = _TIME.fullmatch(time)
    if not found:
        raise BadInput("VALUE", "not a time of Slurm", where="slurm.time", found=time[:40],
                       allowed="days-hours:minutes:seconds", fix="--slurm.time 04:00:00")  # fmt: skip
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    units = (3600, 60, 1) if days is not None or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86_400.0 + sum(n * unit for n, unit in zip(parts, units, strict=False))


def cost_line(shape: JobShape, slurm: Slurm, limit: Seconds | None, jobs: int = 1) -> str:
    """What `jobs` take at most, for people: GPU-hours, and money where the price is known."""
    what = "GPU" if slurm.gpus != "none" else "rank"
    each, nodes = f"{shape.ranks} {what}{'s' * (shape.ranks > 1)}", f"{shape.nodes} node{'s' * (shape.nodes > 1)}"
    head = f"{jobs} jobs of at most {each} on {nodes}" if jobs > 1 else f"{each} on {nodes}"
    hours = shape.ranks * jobs * (limit or 3600.0) / 3600
    bound = f"for at most {show_seconds(limit)}: {_hours(hours)} {what}-hours" if limit else (
        f"without a limit of time: {_hours(hours)} {what}-hours an hour"
    )  # fmt: skip
    price = slurm.usd_per_gpu_hour
    cost = f", {show_whole(hours * price, 2)} USD at {price:g} USD a {what}-hour" if price else ""
    return f"{head} {bound}{cost}"


def _hours(hours: float) -> str:
    return show_whole(hours) if hours >= 100 else f"{hours:.3g}"
