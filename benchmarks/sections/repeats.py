"""The section on runs that are repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sections.beside_peers import BESIDE
from sections.page_parts import Record, record, section, table


def repeated_runs() -> str:
    found = record("same_bits_h200")
    shapes, steps = found["attention"], found["steps"]
    ratios = {kind: [_ratio(row["ms"]) for row in shapes if bool(row["documents"]) == kind] for kind in (False, True)}
    of_steps = [100 * (row["bitwise"]["median_ms"] / row["any"]["median_ms"] - 1) for row in steps]
    calls = found["calls"]
    return section(
        "The same bits again",
        f"""\
FlashAttention-4's backward pass, called {calls} times with the same tensors: with `kernels.determinism = "any"` all
gradients had the bits of the first call in {_most(shapes, "any")} of {calls} calls at most, with `"bitwise"` in {_least(shapes, "bitwise")} at least. That takes
{_range(ratios[False])} times as long with whole sequences and {_range(ratios[True])} times with documents; of the steps below it is
{min(of_steps):.1f} to {max(of_steps):.1f} %. `bitwise` was to be the default where it costs one percent or less: `any` is.

Runs of {next(iter(found["kills"].values()))["steps"]} steps (4,096 tokens, 8 heads of 128, 2 of keys and values) were killed while they saved in the
background, and resumed. With `bitwise` all losses, gradient norms and the last checkpoint are those of a run that nothing
disturbed; without, two runs differ from their first steps on.""",
        table(
            "shape | same bits of any | same bits of bitwise | any, ms | bitwise, ms",
            [(row["shape"], *(row["same_bits"][kind] for kind in ("any", "bitwise")),
              *(f"{row['ms'][kind][0]:.2f}" for kind in ("any", "bitwise"))) for row in shapes],
        ),
        table(
            "step | any, ms | bitwise, ms",
            [(BESIDE[row["case"]], *(_time(row[kind]) for kind in ("any", "bitwise"))) for row in steps],
        ),
        table("killed run | GPUs | determinism | same bits | first step that differs", list(_killed(found))),
        records=["same_bits_h200.json"],
    )  # fmt: skip


def _killed(found: Record) -> Iterator[Sequence[object]]:
    for gpus, part in ((1, "kills"), (2, "ranks")):
        for name, one in found[part].items():
            what, _, kind = name.rpartition(", ")
            yield what, gpus, kind, "yes" if one["bitwise"] else "no", one["first_differing_step"] or ""


def _ratio(times: Record) -> float:
    return times["bitwise"][0] / times["any"][0]


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _most(rows: Sequence[Record], kind: str) -> int:
    return max(row["same_bits"][kind] for row in rows)


def _least(rows: Sequence[Record], kind: str) -> int:
    return min(row["same_bits"][kind] for row in rows)


def _time(run: Record) -> str:
    return f"{run['median_ms']:.1f} ({run['spread_ms'][0]:.0f}–{run['spread_ms'][1]:.0f})"
