"""The traffic of one rank as rows: who it talks to, over which link, how much and for how long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penteract.explore.amounts import amount, share
from penteract.explore.answers.ranks.rank_runs import flat, ranks_text, runs_of
from penteract.explore.schemas.ranks_schema import LinkSum, LinkTraffic
from penteract.readings.rank_traffic import ACTIVATIONS, SCALES, Channel, Sent
from penteract.units import show_step, show_whole

_PICO = 1e-12
# Of each axis that traffic goes over: the dimension whose colour it has, and its name.
AXES: Mapping[str, tuple[str, str]] = {
    "tp": ("tp", "Tensor"), "cp": ("cp", "Context"), "ep": ("ep", "Expert"), "sequence": ("", "Same sequence"),
    "dp": ("dp", "Data"), "pp": ("pp", "Pipeline"), "dp_cp_tp": ("", "Pipeline rank"), "world": ("", "All ranks"),
}  # fmt: skip
_WHAT: Mapping[str, str] = {
    ACTIVATIONS: "activations and their gradients", SCALES: "scales of FP8 values",
    "send value": "activations to the next stage", "recv value": "activations from the stage before",
    "send gradient": "gradients to the stage before", "recv gradient": "gradients from the next stage",
}  # fmt: skip
_OF_AXIS: Mapping[tuple[str, str, str], str] = {
    ("all_to_all_v", "ep", ACTIVATIONS): "tokens to their experts, and back",
    ("all_to_all", "ep", ACTIVATIONS): "how many tokens come",
    ("all_gather", "ep", ACTIVATIONS): "tokens to all ranks that share experts; gradients of their sums",
    ("reduce_scatter", "ep", ACTIVATIONS): "what each rank's experts add to tokens; gradients of tokens",
    ("all_reduce", "tp", ACTIVATIONS): "maxima and sums of the loss",
    ("all_reduce", "sequence", ACTIVATIONS): "statistics of the routers",
}


def nodes_of(ranks: Iterable[int], per_node: int) -> int:
    """How many nodes these ranks are on."""
    return len({rank // per_node for rank in ranks})


def link_text(ranks: Sequence[int], per_node: int) -> str:
    """Where a group is."""
    nodes = nodes_of(ranks, per_node)
    return "within a node" if nodes == 1 else f"between {show_whole(nodes)} nodes"


def rows(found: Mapping[Channel, Sent], step: int, per_node: int) -> list[LinkTraffic]:
    """One for each channel, those that take longest first. `step`: its picoseconds."""
    ordered = sorted(found.items(), key=lambda one: (-one[1].picoseconds, -one[1].size, one[0]))
    return [_row(channel, sent, step, per_node) for channel, sent in ordered]


def _row(channel: Channel, sent: Sent, step: int, per_node: int) -> LinkTraffic:
    dimension, label = AXES[channel.axis]
    message = channel.collective in ("send", "recv")
    runs = runs_of(sorted(channel.ranks))
    seconds = sent.picoseconds * _PICO
    return {
        "dimension": dimension, "label": label, "collective": channel.collective, "what": _what(channel),
        "ranks": flat(runs), "text": f"rank {channel.ranks[1]}" if message else ranks_text(runs),
        "size": len(channel.ranks), "link": "inside" if nodes_of(channel.ranks, per_node) == 1 else "between",
        "link_text": link_text(channel.ranks, per_node), "count": sent.calls, "calls": show_whole(sent.calls),
        "amount": amount(sent.size), "picoseconds": sent.picoseconds,
        "seconds": show_step(seconds) if seconds else "with its send",
        "share": share(sent.picoseconds, step) if seconds else "",
        "rate": _rate(sent.size / seconds / 1e9) if seconds else "",
    }  # fmt: skip


def _rate(gb_per_second: float) -> str:
    return f"{gb_per_second:.3g} GB/s" if gb_per_second >= 0.1 else "<0.1 GB/s"


def _what(channel: Channel) -> str:
    if (channel.collective, channel.axis, channel.what) in _OF_AXIS:
        return _OF_AXIS[channel.collective, channel.axis, channel.what]
    if channel.what in _WHAT:
        return _WHAT[channel.what]
    collective, _, rest = channel.what.partition(" ")
    return rest if collective == channel.collective else channel.what


def sums(found: Sequence[LinkTraffic], step: int) -> list[LinkSum]:
    """The rows of each dimension and kind of link, added up."""
    out = dict[tuple[str, str], list[LinkTraffic]]()
    for row in found:
        out.setdefault((row["label"], row["link"]), []).append(row)
    return [_sum(some, step) for some in out.values()]


def _sum(some: Sequence[LinkTraffic], step: int) -> LinkSum:
    took = sum(row["picoseconds"] for row in some)
    link = some[0]["link"]
    return {
        "dimension": some[0]["dimension"], "label": some[0]["label"], "link": link,
        "link_text": "within a node" if link == "inside" else "between nodes",
        "calls": show_whole(sum(row["count"] for row in some)),
        "amount": amount(sum(row["amount"]["bytes"] for row in some)), "picoseconds": took,
        "seconds": show_step(took * _PICO), "share": share(took, step),
    }  # fmt: skip
