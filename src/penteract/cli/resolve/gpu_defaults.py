"""What a run on GPUs has where nobody says: the fastest that they can do. A line tells what was chosen, and the run's
file keeps it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from penteract.cli.resolve.card_cluster import Card, cluster_of, planned_seconds
from penteract.config.hardware import Gpu
from penteract.config.layout import COLLECTIVES, FUSIONS, Layout
from penteract.config.resolve.resolved_run import Resolved
from penteract.config.rules.determinism import not_seen_to_repeat, was_repeated
from penteract.config.rules.expert_kernels import fastest_experts, fastest_rows
from penteract.config.rules.kernel_limits import (
    fastest_attention,
    fastest_elementwise,
    fastest_fusions,
)
from penteract.config.rules.kernel_packages import packages_here
from penteract.config.run import RunSpec
from penteract.errors import BadInput
from penteract.parallel import direct
from penteract.planner.reference_node import reference_node
from penteract.readings.estimator import Estimator
from penteract.units import Bytes, show_bytes

DRIVER = Path("/proc/driver/nvidia/version")
BF16 = (8, 0)  # compute capability from which GPUs multiply bf16
ROOM = 0.92  # of a GPU's free memory that tensors may take: the rest is for libraries and gaps between blocks
HARDLY = 1.01  # of the time of a step: so much may it cost that a run has the same bits when it is repeated
LONGEST = 2**16  # tokens of a micro-batch: more make no product faster

_COLLECTIVES = "kernels.collectives"
_OVERLAPPED = f"{_COLLECTIVES}=overlapped"
_ROWS = "parallel.expert_rows"
_DETERMINISM = "kernels.determinism"

Again = Callable[[list[str]], Resolved]  # resolves the run anew, with these words before those of the command line


def card_here(device: str, *, launched: bool = False) -> Card | None:
    """The GPU with the least free memory, if ranks will use GPUs; None where none answers.

    `launched`: other hosts decide for themselves, and must come to the same: by the memory that a GPU has, not by what
    happens to be free.
    """
    if device == "cpu" or not DRIVER.exists() or find_spec("torch") is None:
        return None
    found = import_module("penteract.engine.doctor.probe.gpus").gpus(None)
    usable = [gpu for gpu in found.devices if gpu.free and gpu.capability]
    if not usable:
        return None
    least = min(usable, key=lambda gpu: gpu.memory if launched else gpu.free)
    triton = {"triton"} if find_spec("triton") is not None else set[str]()
    room = least.memory if launched else least.free
    packages = packages_here() | triton
    linked = _linked(found.matrix, one_each=launched and _visible() == 1)
    # Without a launcher all ranks are here. Hosts may differ in this number, but not if it is that of the whole run.
    together = os.environ.get("LOCAL_WORLD_SIZE", "1") if launched else str(len(usable))
    return Card(
        name=least.name, free=room, capability=tuple(least.capability), packages=packages, peers=linked,
        host_ranks=int(together) if together.isdecimal() else 1,
    )  # fmt: skip


def _linked(matrix: Sequence[Sequence[str]] | None, *, one_each: bool) -> int:
    """How many GPUs there are if NVLinks join all, as `doctor` shows them. `one_each`: a process sees only its own."""
    links = [way for i, row in enumerate(matrix or ()) for j, way in enumerate(row) if i != j]
    joined = bool(links) and not one_each and all(way.startswith("NV") for way in links)
    return len(matrix or ()) if joined else 0


def _visible() -> int:
    """How many GPUs CUDA_VISIBLE_DEVICES leaves a process; 0 where it is not set."""
    return sum(1 for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name)


def card_of(node: Gpu, *, container: bool, host_ranks: int = 1) -> Card | None:
    """The GPU of a node that is not asked, by its data sheet; None for what is no GPU of CUDA. Ranks have the packages
    of this installation, or those of a `container`: of these, it is sure of triton alone, which comes with torch.
    `host_ranks`: of a job, on each node."""
    if not any(node.capability):
        return None
    triton = {"triton"} if container or find_spec("triton") is not None else set[str]()
    packages = triton if container else packages_here() | triton
    return Card(
        name=node.name, free=int(node.memory_gib * 2**30), capability=node.capability, packages=frozenset(packages),
        host_ranks=host_ranks,
    )  # fmt: skip


def settle_defaults(
    resolved: Resolved, card: Card | None, again: Again, *, resumed: bool = False
) -> tuple[Resolved, str]:
    """The run with what nobody decided chosen for a card, and a line that says so; "" where nothing was open. A run
    that is `resumed` has its kernels in its file."""
    if card is None or resumed:
        return resolved, ""
    words, made = list[str](), resolved
    if resolved.is_open("precision.dtype") and card.capability >= BF16:
        words.append("precision.dtype=bf16")
        made = again(words)
    words += [f"{key}={value}" for key, value in _kernels(made, card) if resolved.is_open(key)]
    made = again(words) if words else resolved
    if resolved.origins["batch.micro_batch_size"].startswith("derived"):
        made, size = _largest(made, card, lambda more: again([*words, *more]))
        words += size
    made, words = _with_fastest_rows(made, card, words, again)
    made, words = _with_fastest_collectives(made, card, words, again)
    made, words = _with_same_bits(made, card, words, again)
    if not words:
        return resolved, ""
    origins = dict(made.origins) | dict.fromkeys((w.partition("=")[0] for w in words), f"chosen for {card.name}")
    chosen = ", ".join(word.partition(".")[2].replace("=", " ") for word in words)
    line = f"Chosen for {card.name} with {show_bytes(card.free)} free: {chosen}"
    return replace(made, origins=origins), line


def _kernels(resolved: Resolved, card: Card) -> Iterator[tuple[str, str]]:
    """The fastest kernels that the card, the precision and the data allow."""
    run, policy = resolved.run, resolved.run.precision.policy
    if "triton" in card.packages and fastest_elementwise(policy) == "triton":
        yield "kernels.elementwise", "triton"
        fusions = fastest_fusions(run.model, run.layout, policy, card.packages, capability=card.capability)
        yield "kernels.fuse", "all" if fusions == FUSIONS else json.dumps(fusions)
    attention = fastest_attention(
        run.model, run.layout, policy, card.packages, capability=card.capability, documents=run.data.pack_documents,
    )  # fmt: skip
    if attention != "reference":
        yield "kernels.attention", attention
    experts = fastest_experts(run.model, run.layout, policy, card.packages, capability=card.capability)
    if experts != "reference":
        yield "kernels.experts", experts
    ranks = run.layout.tp * run.layout.cp  # which must be neighbours on one host
    some = direct.axes(run.layout.put(collectives="overlapped"))
    if some and card.peers and card.peers % ranks == 0:
        yield _COLLECTIVES, "overlapped"


def _with_fastest_rows(resolved: Resolved, card: Card, words: list[str], again: Again) -> tuple[Resolved, list[str]]:
    """With padded rows of experts where nobody decided it, they fit the card with the micro-batch that there is, and
    the planned step takes no longer: it may where a kernel goes over rows that did not come, too. Without a plan they
    are exact. A budget of memory would pay for padded ones with recomputation."""
    run = resolved.run
    rows = fastest_rows(run.model, run.layout, run.precision.policy)
    if not resolved.is_open(_ROWS) or rows == run.layout.expert_rows or resolved.budget is not None:
        return resolved, words
    more = [*words, f"{_ROWS}={rows}"]
    made = again(more)
    if _allocated(made.run, made.run.layout) > card.free * ROOM:
        return resolved, words
    nodes = cluster_of(card, run.layout.world, {})  # as one host, so that all of a launcher's come to the same
    try:
        as_fast = nodes is not None and planned_seconds(made.run, nodes) <= planned_seconds(run, nodes)
    except BadInput:  # the card has no products in this precision
        as_fast = False
    return (made, more) if as_fast else (resolved, words)


def _with_fastest_collectives(
    resolved: Resolved, card: Card, words: list[str], again: Again
) -> tuple[Resolved, list[str]]:
    """With the collectives that a plan finds fastest, where `words` choose overlapped ones: these have more calls, and
    a short step waits for the host, which makes them. A card that the catalog has no such links of keeps its own."""
    nodes = cluster_of(card, resolved.run.layout.world, {})  # as one host, so that all of a launcher's come to the same
    if _OVERLAPPED not in words or nodes is None or not nodes.reads_directly:
        return resolved, words
    rest = [word for word in words if word != _OVERLAPPED]
    every = [rest if kind == "library" else [*rest, f"{_COLLECTIVES}={kind}"] for kind in COLLECTIVES]
    made = [again(more) for more in every]
    try:
        seconds = [planned_seconds(one.run, nodes) for one in made]
    except BadInput:  # the card has no products in this precision
        return resolved, words
    best = seconds.index(min(seconds))  # of equal ones the simplest, and none needs more memory than overlapped ones
    return made[best], every[best]


def _with_same_bits(resolved: Resolved, card: Card, words: list[str], again: Again) -> tuple[Resolved, list[str]]:
    """With bits that a run has again when it is repeated, where nobody decided that, such runs were repeated on such a
    card, and a step is planned to take hardly longer. What it needs in memory decides only if the run fits without."""
    run, nodes = resolved.run, cluster_of(card, resolved.run.layout.world, {})
    bitwise = run.layout.put(determinism="bitwise")
    seen = was_repeated(run, card.name, card.host_ranks if card.peers else 1)
    unseen = not seen or any(not_seen_to_repeat(run.model, bitwise, card.capability))
    if not resolved.is_open(_DETERMINISM) or bitwise == run.layout or nodes is None or unseen:
        return resolved, words
    more = [*words, f"{_DETERMINISM}=bitwise"]
    try:
        made = again(more)
        slower = planned_seconds(made.run, nodes) / planned_seconds(run, nodes)
    except BadInput:  # attention does not repeat, or the card has no products in this precision
        return resolved, words
    without, with_it = (_allocated(one, one.layout) for one in (run, made.run))
    fits = not without <= card.free * ROOM < with_it
    return (made, more) if fits and slower <= HARDLY else (resolved, words)


def _largest(resolved: Resolved, card: Card, again: Again) -> tuple[Resolved, list[str]]:
    """With the largest micro-batch that fits by prediction; as it is where that is the one it has."""
    run, best = resolved.run, resolved
    share = run.layout.global_batch_size // run.layout.dp
    room, word = int(card.free * ROOM), list[str]()
    for size in (n for n in range(run.layout.micro_batch_size + 1, share + 1) if share % n == 0):
        if size * run.sequence_length > LONGEST:
            break
        try:
            larger = again([f"batch.micro_batch_size={size}"])
        except BadInput:  # a pipeline may want more micro-batches than are left
            continue
        if _allocated(larger.run, larger.run.layout) > room:
            break
        best, word = larger, [f"batch.micro_batch_size={size}"]
    return best, word


def _allocated(run: RunSpec, layout: Layout) -> Bytes:
    """Bytes of the fullest rank. Work and time are not asked for, so any node will do."""
    return Estimator.of_run(run, reference_node(layout.world)).estimate(layout).allocated
