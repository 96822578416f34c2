"""The section on runs that are repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from penteract.config.rules.determinism import TWO_RANKS
from sections.beside_peers import BESIDE
from sections.page_parts import Record, record, section, table

CASES_OF_TWO = ("A2", "tp2", "pp2")


def repeated_runs() -> str:
    found = record("same_bits_h200")
    shapes, steps, calls = found["attention"], found["steps"], found["calls"]
    ratios = {kind: [_ratio(row["ms"]) for row in shapes if bool(row["documents"]) == kind] for kind in (False, True)}
    whole, packed = (
        [_longer(row) for row in steps if row["case"].endswith("_documents") == kind and row["case"] not in CASES_OF_TWO]
        for kind in (False, True)
    )  # fmt: skip
    of_two = {row["case"]: row for row in steps if row["case"] in CASES_OF_TWO}
    same = {kind: [row["same_bits"][kind] for row in shapes] for kind in ("off", "bitwise")}
    if not found["ranks"][f"{TWO_RANKS}, bitwise"]["bitwise"]:
        raise ValueError(f"bitwise by default, and it ended with other bits: {TWO_RANKS}")
    return section(
        "The same bits again",
        f"""\
FlashAttention-4's backward pass, called {calls} times more with the same tensors: with `kernels.determinism = "off"` {_calls(same["off"], calls)}
the bits of the first, with `"bitwise"` {_calls(same["bitwise"], calls)}. It takes {_range(ratios[False])} times as long then with whole sequences,
and {_range(ratios[True])} times with documents. Steps of whole sequences, in turns, take {min(whole):.1f} to {max(whole):.1f} % longer, and steps
with documents {min(packed):.1f} to {max(packed):.1f} %. On two GPUs, {_longer(of_two["tp2"]):.1f} % with tensor parallelism, and {_longer(of_two["A2"]):.1f} % with data
parallelism, for which {_longer(of_two["A2"], "planned_ms"):.1f} % are planned: gradients are reduced beside attention's backward pass. Longer sequences
were not timed.

Runs of {next(iter(found["kills"].values()))["steps"]} steps (4,096 tokens, 8 heads of 128, 2 of keys and values) were killed while they saved in the
background, and resumed. With `bitwise` all losses, gradient norms and the last checkpoint are those of a run that nothing
disturbed; without, two runs differ from their first steps on. FP8 has a scale a tensor, collectives are NCCL's, rows of
experts are exact and sequences whole (but of context parallelism) where a name does not say otherwise.

So `bitwise` is the default where it is planned to cost at most 1 %, which is mostly that of whole sequences: on one H200 with
FlashAttention-4, and on two that NVLink joins with AdamW in bf16 and the layout whose steps were timed: {TWO_RANKS}.

Falls short: not run were more than two GPUs, several hosts, and other cards; on two GPUs Muon, experts that are not shared by
both, FP8 with a scale a row, ZeRO with context parallelism{"".join(f", {name}" for name in _not_run(found))}. All are legal with `bitwise`, and `off` by
default.""",
        table(
            "sequences | tokens | heads, of keys | size | documents | window | same bits, off | same bits, bitwise | off, ms | bitwise, ms",
            [(*(row[name] for name in ("sequences", "tokens")), f"{row['heads']}, {row['kv_heads']}", row["size"],
              row["documents"] or "", row["window"] or "", *(f"{n} of {calls}" for n in row["same_bits"].values()),
              *(f"{row['ms'][kind][0]:.3f}" for kind in ("off", "bitwise"))) for row in shapes],
        ),
        table(
            "step | off, ms | bitwise, ms",
            [(BESIDE[row["case"]], *(", ".join(f"{run['median_ms']:.1f}" for run in row[kind]) for kind in ("off", "bitwise")))
             for row in steps],
        ),
        table("killed run | GPUs | determinism | same bits | first step that differs", list(_killed(found))),
        records=["same_bits_h200.json"],
    )  # fmt: skip


def _not_run(found: Record) -> Iterator[str]:
    """Of what `same_bits.py` can run on two GPUs."""
    said = {"context parallel, ring": "a ring", "pipeline, zb_h1": "the schedule zb_h1", "experts of two ranks, all-to-all":
            "experts by all-to-all", "experts of two ranks, in blocks": "experts in blocks"}  # fmt: skip
    for name, words in said.items():
        if f"{name}, bitwise" not in found["ranks"]:
            yield words


def _longer(row: Record, what: str = "median_ms") -> float:
    """Percent that a step takes more with `bitwise`."""
    bitwise, off = (fmean(run[what] for run in row[kind]) for kind in ("bitwise", "off"))
    return 100 * (bitwise / off - 1)


def _killed(found: Record) -> Iterator[Sequence[object]]:
    for gpus, part in ((1, "kills"), (2, "ranks")):
        for name, one in found[part].items():
            what, _, kind = name.rpartition(", ")
            yield what, gpus, kind, "yes" if one["bitwise"] else "no", one["first_differing_step"] or ""


def _ratio(times: Record) -> float:
    return times["bitwise"][0] / times["off"][0]


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _calls(same: Sequence[int], calls: int) -> str:
    """How many calls of each shape had the same bits."""
    least, most = min(same), max(same)
    return "all had" if least == calls else "none had" if not most else f"{least} to {most} had"
