"""What a layout takes of the memory of each host, and whether it is there."""

from __future__ import annotations

from dataclasses import dataclass

from penteract.planner.plan import Plan
from penteract.planner.search.best import Timed
from penteract.readings.memory.host_copies import snapshot_bytes
from penteract.units import Bytes, show_bytes


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Bytes of one host, of all its ranks.

    offloaded  what the layout keeps there in each step
    copied     what a run copies there for saves in the background, if it has them
    has        what the host has; 0: not known
    """

    offloaded: Bytes
    copied: Bytes
    has: Bytes

    @classmethod
    def of(cls, plan: Plan, timed: Timed) -> HostRoom:
        """That of a layout of a plan."""
        planner = plan.search.estimators[timed.estimate.precision].composer.bucket_planner
        share, ranks = plan.ask.cluster.host_share, min(timed.layout.world, plan.ask.cluster.gpus_per_node)
        return cls(*(n * ranks for n in (timed.estimate.host, snapshot_bytes(planner, timed.layout), share)))

    @property
    def saves_in_background(self) -> bool:
        """Whether there is room for saves in the background, as far as is known."""
        return not self.has or self.offloaded + self.copied <= self.has

    def text(self) -> str:
        """What saves in the background take, as a sentence."""
        what = f"Saves in the background: {show_bytes(self.copied)} of each host's memory"
        if not self.has:
            return f"{what}, if a run has them"
        left = f", of which offloaded tensors leave {show_bytes(self.has - self.offloaded)}" if self.offloaded else ""
        room = f"which has {show_bytes(self.has)}{left}"
        if self.saves_in_background:
            return f"{what}, {room}, if a run has them"
        return f"{what}, {room}: they do not fit, so a run has to wait for its saves (checkpoint.asynchronous = false)"


def crowded(plan: Plan) -> str:
    """A note about the listed layouts whose hosts have no room for saves in the background; "" if there is room."""
    if not plan.ask.cluster.host_memory_gib or not plan.counts.fit:
        return ""
    found = [n for n, timed in enumerate(plan.layouts, 1) if not HostRoom.of(plan, timed).saves_in_background]
    if not found:
        return ""
    which = "all layouts listed" if len(found) == len(plan.layouts) > 1 else f"layout {', '.join(map(str, found))}"
    return (
        f"a host has {plan.ask.cluster.host_memory_gib:.2f} GiB, too little for the copies of saves in the background "
        f"with {which}: --out writes checkpoint.asynchronous = false"
    )
