"""The answer of the Ranks view: groups are those of the mesh, bytes those of the price, seconds those of the clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penteract.config.layout import Layout
from penteract.config.mesh import AXES, Mesh
from penteract.explore.answers.glossary import TERMS
from penteract.explore.answers.questions import Asked, changed
from penteract.explore.answers.ranks.holders import axes_of, choices, held
from penteract.explore.answers.ranks.rank_runs import count_text, flat, ranks_text, runs_of
from penteract.explore.answers.ranks.traffic_rows import link_text, nodes_of, rows, sums
from penteract.explore.schemas.page_schema import VERSION
from penteract.explore.schemas.page_values import Fact, Question
from penteract.explore.schemas.ranks_schema import LinkTraffic, MeshAxis, RanksAnswer
from penteract.planner.plan import Plan
from penteract.planner.report.as_text import headline
from penteract.planner.search.best import Timed
from penteract.readings.rank_traffic import Channel, RankTraffic, Sent, traffic
from penteract.units import show_bytes, show_step, show_whole

_PS = 10**12
# The axes that the page draws, and what they are called.
_LABELS: Mapping[str, str] = {"pp": "Pipeline", "dp": "Data", "cp": "Context", "tp": "Tensor", "ep": "Expert"}
_EXPOSED = ("tensor", "context", "expert", "data", "pipeline")
_MISSING = "There is one rank, so nothing is sent. With dp of 8 there are eight, which sum their gradients."


class _Kept(NamedTuple):
    """The last rank's traffic: another parameter, and a page that comes back to it, need no other."""

    key: str
    traffic: RankTraffic


_last: list[_Kept] = []


def ranks_answer(asked: Asked, plan: Plan, timed: Timed, rank: int, parameter: str) -> RanksAnswer:
    """The mesh, and the traffic and parameters of `rank`: a rank that the layout does not have is its first."""
    lay, per_node = timed.layout, plan.ask.cluster.gpus_per_node
    rank = rank if 0 <= rank < lay.world else 0
    mesh, (channels, program) = Mesh(lay), _kept(asked, plan, timed, rank).traffic
    step = round(timed.time.seconds * _PS)
    found = rows(channels, step, per_node)
    added = sums(found, step)
    nodes = -(-lay.world // per_node)
    return {
        "version": VERSION, "kind": "ranks", "question": asked.page, "command": asked.command, "rank": rank,
        "place": axes_of(mesh, rank), "world": lay.world, "per_node": min(per_node, lay.world), "nodes": nodes,
        "nodes_text": _nodes_text(plan, nodes), "headline": headline(plan), "number": _bytes(found),
        "verdict": _verdict(rank, channels, found), "facts": _facts(plan, timed, found, nodes),
        "axes": [_axis(mesh, name, rank, per_node) for name in _LABELS if mesh.size(name) > 1],
        "traffic": found, "sums": added, "most": max((row["picoseconds"] for row in found), default=0),
        "parameters": choices(program), "parameter": held(program, parameter),
        "missing": _MISSING if lay.world == 1 else "", "more": _more(asked.page, lay),
    }  # fmt: skip


def _kept(asked: Asked, plan: Plan, timed: Timed, rank: int) -> _Kept:
    key = json.dumps([asked.page, rank], sort_keys=True)
    if not _last or _last[0].key != key:
        _last.clear()
        steps = plan.search.estimators[timed.estimate.precision].steps
        _last.append(_Kept(key, traffic(steps, timed.layout, rank)))
    return _last[0]


def _axis(mesh: Mesh, name: str, rank: int, per_node: int) -> MeshAxis:
    ranks = mesh.group(name, rank)
    block, stride = mesh.block(name)
    runs = runs_of(ranks)
    return {
        "axis": name, "label": _LABELS[name], "about": TERMS[name], "size": AXES[name].size(mesh.layout),
        "block": block, "step": stride, "coordinate": name != "ep", "ranks": flat(runs),
        "text": f"{ranks_text(runs)} ({count_text(len(ranks))})",
        "link": "inside" if nodes_of(ranks, per_node) == 1 else "between", "link_text": link_text(ranks, per_node),
    }  # fmt: skip


def _nodes_text(plan: Plan, nodes: int) -> str:
    cluster = plan.ask.cluster
    inside, between = cluster.inside.name if cluster.inside else "?", cluster.between.name if cluster.between else "?"
    each = f"{cluster.gpus_per_node} GPU{'s' * (cluster.gpus_per_node > 1)}"
    if nodes == 1:
        return f"One node of {each} ({inside})"
    return f"{show_whole(nodes)} nodes of {each}: {inside} within a node, {between} between nodes"


def _bytes(found: Sequence[LinkTraffic]) -> str:
    return show_bytes(sum(row["amount"]["bytes"] for row in found))


def _verdict(rank: int, channels: Mapping[Channel, Sent], found: Sequence[LinkTraffic]) -> str:
    peers = {other for channel in channels for other in channel.ranks} - {rank}
    if not found:
        return "The only rank sends nothing."
    groups = {tuple(row["ranks"]) for row in found}
    return (f"Rank {rank} has {len(groups)} group{'s' * (len(groups) > 1)} and talks to {show_whole(len(peers))} "
            f"other rank{'s' * (len(peers) > 1)}: {_over(found, 'inside')} within its node, "
            f"{_over(found, 'between')} between nodes.")  # fmt: skip


def _busy(found: Sequence[LinkTraffic]) -> str:
    return show_step(sum(row["picoseconds"] for row in found) / _PS) if found else "-"


def _over(found: Sequence[LinkTraffic], link: str) -> str:
    some = [row for row in found if row["link"] == link]
    return f"{_bytes(some)} in {_busy(some)}" if some else "nothing"


def _facts(plan: Plan, timed: Timed, found: Sequence[LinkTraffic], nodes: int) -> list[Fact]:
    parts, seconds = timed.time.parts, timed.time.seconds
    inside, between = ([row for row in found if row["link"] == link] for link in ("inside", "between"))
    alone = "each call on its own, by the clock of the simulated step"
    return [
        {"label": "Within the node", "text": _bytes(inside), "source": "bytes of the price, over groups of one node"},
        {"label": "Between nodes", "text": _bytes(between), "source": "bytes of the price, over groups of several"},
        {"label": "Busy within", "text": _busy(inside), "source": alone},
        {"label": "Busy between", "text": _busy(between), "source": alone},
        {"label": "Waited for", "text": show_step(sum(parts.get(part, 0.0) for part in _EXPOSED)),
         "source": "what no compute hides, with the bubble, on the rank that ends last"},
        {"label": "Step", "text": show_step(seconds), "source": "simulated with measured rates"},
        {"label": "GPUs", "text": show_whole(timed.layout.world), "source": "dp · tp · pp · cp"},
        {"label": "Nodes", "text": show_whole(nodes), "source": _nodes_text(plan, nodes)},
    ]  # fmt: skip


def _more(page: Question, layout: Layout) -> Question | None:
    """A question of eight ranks, with a batch that they can share."""
    if layout.world > 1:
        return None
    least = 8 * layout.micro_batch_size
    return changed(page, {"dp": 8, "global_batch_size": -(-page["global_batch_size"] // least) * least})
