"""What the sections of docs/benchmarks.md are made of: records, tables, and numbers as text."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Record = Mapping[str, Any]
LAST = 10  # the loss of a run is the mean of its last 10 steps
QUIET = r",(elementwise|fuse|collectives|experts)=[^,]*"  # of a layout's text
FAR = 2  # from this ratio of recorded to planned time on, a row of the sweep is counted as far off
# The names of some cases in the records -> what the page shows.
CASES = {
    "every second layer recomputed": "full recomputation of every second layer",
    "activations and norms recomputed": "recomputation of SwiGLU and norms",
    "full recomputation, inputs of layers on the host": "full recomputation, layer inputs offloaded to the host",
    "bf16 alone, rounded by chance": "bf16 without master weights, stochastic rounding",
    "moments in 8 bits": "8-bit moments",
    "gradients summed in bf16": "gradients reduced in bf16",
    "ZeRO 3, parameters kept gathered": "ZeRO 3, reshard after the step",
    "ZeRO 3, gradients summed once": "ZeRO 3, one reduce-scatter a step",
    "optimizer on the host": "optimizer states offloaded to the host",
    "bf16, moments in 16 bits": "bf16, 16-bit moments",
    "bf16, moments in 8 bits": "bf16, 8-bit moments",
    "bf16, moments in 8 bits but of the embedding, of others in 16 and 32":
        "bf16, 8-bit moments; embedding and output projections 32-bit, layer 0 16-bit",
    "bf16, no master, moments in 8 bits": "bf16 without master weights, 8-bit moments",
    "bf16, sums in 16 bits": "bf16, gradients reduced in bf16",
    "fp16, moments in 8 bits": "fp16, 8-bit moments",
    "fp8_rowwise, powers of two, last layer and output projections in bf16":
        "fp8_rowwise, scales are powers of two, last layer and output projections in bf16",
    "embedding: few ids": "embedding: 64 ids",
    "swiglu: 768, of experts": "swiglu: 768, experts",
}  # fmt: skip


def record(name: str) -> Record:
    """The record `benchmarks/results/NAME.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def planned_ms(group: str) -> dict[str, float]:
    """The planned milliseconds of each row of a record, from planned_times.json."""
    return {row["row"]: row["planned_ms"] for row in record("planned_times")["groups"][group]["rows"]}


def section(title: str, prose: str, *tables: str, records: Sequence[str]) -> str:
    """A heading, paragraphs, tables, and a list of the records they come from."""
    filled = [paragraph(one) for one in prose.split("\n\n")]
    listed = "\n".join(f"- {origin(file)}" for file in records)
    return "\n\n".join([f"## {title}", *filled, *tables, f"Records:\n\n{listed}"])


def paragraph(prose: str) -> str:
    """A paragraph, in lines."""
    return textwrap.fill(prose, 120, break_long_words=False, break_on_hyphens=False)


def origin(file: str) -> str:
    """A link to a record, with the device, versions, commit and date that it contains."""
    link = f"[`{file}`](../benchmarks/results/{file})"
    if not file.endswith(".json"):
        return link
    found = record(file.removesuffix(".json"))
    versions = found.get("versions", found)
    commit = re.sub("^([0-9a-f]{7})[0-9a-f]*", r"\1", found.get("commit", ""))
    details: list[str] = [
        found.get("device") or found.get("gpu") or "",
        *(f"{name} {versions[name]}" for name in ("torch", "nccl", "python") if name in versions),
        f"commit `{commit}`" if commit else "",
        found.get("date", ""),
    ]
    return f"{link}: {', '.join(one for one in details if one)}" if any(details) else link


def parts(of: Record) -> list[tuple[str, dict[str, Any]]]:
    """The entries of a record that are objects."""
    return [(name, cast("dict[str, Any]", one)) for name, one in of.items() if isinstance(one, dict)]


def table(head: str, rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. `head`: the names of its columns, separated by `|`; those after the first are right-aligned."""
    names = [name.strip() for name in head.split("|")]
    rule = ["---", *["---:"] * (len(names) - 1)]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (names, rule, *rows))


def ms(steps: Sequence[float], middle: float | None = None) -> str:
    """Median milliseconds of timed steps, with their range."""
    return f"{median(steps) if middle is None else middle:,.0f} ({min(steps):,.0f}–{max(steps):,.0f})"


def percent(share: float) -> str:
    """A share as a percentage with one digit."""
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # + 0.0: no minus before a zero


def text(layout: Mapping[str, Any]) -> str:
    """A layout of a record, as --layout takes it."""
    settings: dict[str, Any] = {
        k: "+".join(cast("list[str]", v)) if isinstance(v, list) else v for k, v in layout.items()
    }
    return "`" + ",".join(f"{k}={v}" for k, v in settings.items() if k != "gradient_accumulation_steps") + "`"
