"""Writes docs/kernels.md from the records of benchmarks/step_kernels.py: where the time of a step on one GPU goes.

python docs/kernels.py          # writes the page
python docs/kernels.py --check  # exit code 1 if the page is not what the records give
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from drawn_shapes import read_cases
from sections.page_parts import Record, origin, percent, record, table

PAGE = Path(__file__).with_suffix(".md")
CASES = {
    "A1": "8 layers of Llama-3-8B, 2 sequences of 8,192 tokens, bf16",
    "A1_fp8": "The same in FP8, one scale a tensor",
    "B1": "1B, 4 sequences of 4,096 tokens, bf16",
    "F1": "4 layers of Qwen3-30B-A3B, 4 sequences of 4,096 tokens, bf16",
}
REST = "the rest"
PHASES = {"forward": "forward", "input_gradient": "backward", "weight_gradient": "backward"}
# What a part of the program belongs to: the first line whose op and file fit.
GROUPS = (
    ("embedding", r"embedding", r""),
    ("SwiGLU", r"(packed_)?swiglu", r"mlp"),
    ("casts to FP8", r"quantise", r""),
    ("routing", r"router|expert_permutation|expert_offsets|split_sizes|permute|unpermute|tokens_per_expert", r""),
    ("experts", r"expert_linear|expert_pair|swiglu|add", r"moe"),
    ("gate, up and down projections", r"\w*linear|fp8_glu|merged_glu", r"mlp"),
    ("attention's projections", r"\w*linear|rope", r"attention"),
    ("attention", r"\w*attention", r""),
    ("output projection", r"logits", r""),
    ("loss", r"\w*loss\w*|row_max|exp_sum|negative_log_likelihood|logits_gradient", r""),
    ("norms and residual sums", r"fork_norm|add_norm|rms_norm|add|rows|join_rows", r""),
)
INTRODUCTION = """\
# Kernels of a step

Where the time of a training step on one GPU goes, in the order of the step. `python docs/kernels.py` writes this page
from the records that are listed below; a test compares them. `benchmarks/step_kernels.py` makes the record: it times
steps, profiles one of them, and asks the planner for the FLOPs, bytes and milliseconds of the same parts.

- **ms**: the kernels of this part in one step. "Plain" is the same step as PyTorch has it without this program's
  kernels: no fused ops, plain elementwise kernels, cuDNN's attention, a product for each expert.
- **planned**: what `penteract plan` counts for this part.
- **TFLOP/s, TB/s**: FLOPs of products and attention, and bytes that have to be read and written, by the measured time.
- **of the ceiling**: the time that these FLOPs and bytes need at the best that this card does, by the measured time.
  The ceilings are a product of 8,192 x 8,192 x 8,192, sustained, and a copy of 2 GiB. Products in FP8 have no ceiling
  here. A product of another shape, or a kernel that mostly reads, may be faster than these.

Power limits the clock of this card, so all products together run slower than one alone, and cards differ by some
percent."""
KEPT = """\
## What was chosen among several

Each choice was compared with others on the card. The tables are in [benchmarks.md](benchmarks.md):"""


@dataclass(slots=True)
class Line:
    """One line of a table: sums over some parts of a step."""

    name: str
    ms: float = 0.0
    planned_ms: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    floor_ms: float = 0.0  # at the card's ceilings
    fp8: bool = False  # some of its products are

    def add(self, part: Record, ceilings: Record) -> None:
        """Add a part of the record."""
        self.ms += part["ms"]
        self.planned_ms += part["planned_ms"]
        if self.name == REST:
            return
        self.flops += part["flops"]
        self.bytes += part["bytes"]
        self.floor_ms += 1e3 * max(part["flops"] / ceilings["flops"], part["bytes"] / ceilings["bytes"])
        self.fp8 |= " fp8_" in part["part"]

    def cells(self, plain: float | None) -> Sequence[object]:
        """The cells of its row. `plain`: milliseconds of plain PyTorch; None: there are none."""
        seconds = self.ms / 1e3
        return (
            self.name, f"{self.ms:.2f}", *([] if plain is None else [f"{plain:.1f}" if plain else ""]),
            f"{self.planned_ms:.2f}", f"{self.flops / seconds / 1e12:.0f}" if self.flops else "",
            f"{self.bytes / seconds / 1e12:.2f}" if self.bytes > 0.002 * self.flops else "",
            "" if self.fp8 or not self.floor_ms else f"{percent(self.floor_ms / self.ms)}",
        )  # fmt: skip


def lines(row: Record, ceilings: Record) -> dict[str, Line]:
    """The lines of a case by name, in the order of its step."""
    found = dict[str, Line]()
    backward = False
    for part in row["parts"]:
        name, backward = line_of(part["part"], backward)
        found.setdefault(name, Line(name)).add(part, ceilings)
    return found


def line_of(part: str, backward: bool) -> tuple[str, bool]:
    """The line that a part belongs to, and whether backward has begun. Sums of a fork's gradients are forward ops of
    backward."""
    named = re.match(r"(\w+) (\w+) \((\w+)/(\w+)\.py", part)
    if named is None:
        return {"update": "AdamW", "gradient norm: squares": "gradient norm"}.get(part, REST), backward
    phase, op, _, file = named.groups()
    if op == "loss":  # one number, divided by the number of targets
        return REST, backward
    backward |= phase == "input_gradient" and op == "logits"
    after = PHASES[phase] == "backward" or (backward and op == "add")
    group = next(name for name, ops, of in GROUPS if re.fullmatch(ops, op) and of in file)
    return f"{group}, {'backward' if after else 'forward'}", backward


def section(name: str, rows: dict[str, Record], ceilings: Record) -> str:
    """The section of a case."""
    row, plain = rows[name], rows.get(f"{name}:plain")
    card: Record = row.get("ceilings", ceilings)
    own = lines(row, card)
    before = lines(plain, ceilings) if plain else {}
    columns = [
        "part of the step",
        "ms",
        *(["plain, ms"] if plain else []),
        "planned, ms",
        "TFLOP/s",
        "TB/s",
        "of the ceiling",
    ]
    cells = [
        line.cells(before[line.name].ms if line.name in before else 0.0 if plain else None) for line in own.values()
    ]
    kernels, planned = sum(line.ms for line in own.values()), sum(line.planned_ms for line in own.values())
    share = of_the_ceiling(row, card)
    low, high = row["spread_ms"]
    said = f"The step takes {row['step_ms']:.1f} ms ({low:.1f}–{high:.1f}), in {row['kernels']:,} kernels;"
    said += f" planned are {planned:.1f} ms. In the profiled step the GPU was idle for {row['idle_ms']:.2f} ms"
    said += f" ({percent(row['idle_ms'] / row['profiled_ms'])}), and kernels ran for {kernels:.1f} ms."
    if share is not None:
        said += f" At the card's ceilings they would need {share * kernels:.1f} ms ({percent(share)})."
    if plain:
        said += f" Plain PyTorch: {plain['step_ms']:.1f} ms, in {plain['kernels']:,} kernels, idle for"
        said += f" {plain['idle_ms']:.0f} ms of the profiled step."
    if card is not ceilings:  # measured later
        said += f" {'All but plain' if plain else 'This'} is of commit `{row['commit']}`, {row['date']}, on"
        said += f" {at_best(card)}."
    return f"## {CASES[name]}\n\n{textwrap.fill(said, 120)}\n\n{table(' | '.join(columns), cells)}"


def of_the_ceiling(row: Record, ceilings: Record) -> float | None:
    """The time that the kernels of a case would need at the card's ceilings, over theirs; None in FP8."""
    own = lines(row, ceilings).values()
    if any(line.fp8 for line in own):
        return None
    return sum(line.floor_ms for line in own) / sum(line.ms for line in own)


def drawn_shapes(shares: Sequence[float]) -> str:
    """The section of shapes that were drawn. `shares`: of the ceiling, of the cases above."""
    found, drawn = record("step_kernels_drawn_h200"), read_cases()
    asked = 0.95 * sum(shares) / len(shares)
    rows, reached, attention = list[tuple[str, ...]](), list[float](), list[tuple[float, float]]()
    for row in found["rows"]:
        ceilings = row.get("ceilings", found["ceilings"])
        case, share = drawn[row["case"]], of_the_ceiling(row, ceilings)
        changes = case.changes
        shape = f"{changes['hidden_size']:,} wide, {changes['layers']} layers, heads of {changes['head_size']}"
        if changes["moe"] is not None:
            shape += f", {changes['moe'].experts} experts"
        own = lines(row, ceilings)
        planned = sum(line.planned_ms for line in own.values())
        if (share or 0.0) < asked:
            ours = [line for part, line in own.items() if part.startswith("attention, ")]
            ms = sum(line.ms for line in ours)
            attention.append((ms / sum(line.ms for line in own.values()), sum(line.floor_ms for line in ours) / ms))
        rows.append((shape, f"{case.micro_batch_size} of {case.sequence_length:,}", f"{row['step_ms']:.1f}",
                     f"{planned:.1f}", percent(share or 0.0)))  # fmt: skip
        reached.append(share or 0.0)
    said = (
        f"`benchmarks/drawn_shapes.py` drew six shapes by a seed. Each should reach {percent(asked)} of the ceiling,"
        f" 0.95 of what the cases above do on average; {sum(one >= asked for one in reached)} of {len(rows)} do."
    )
    if attention:
        shares, rates = (" and ".join(percent(x) for x in each) for each in zip(*attention, strict=True))
        said += f" Those that do not spend {shares} of their kernels' time in attention over heads of 64 and long"
        said += f" sequences, where FA4's kernel reaches {rates} of the ceiling; the rest is products of small experts."
    if left := len(drawn) - len(rows):
        said += f" Falls short: {left} of the six {'was' if left == 1 else 'were'} not run."
    return f"## Shapes that nothing was tuned for\n\n{textwrap.fill(said, 120)}\n\n" + table(
        "shape | sequences, tokens | step, ms | planned, ms | of the ceiling", rows
    )


def at_best(card: Record) -> str:
    """What a card does at its best."""
    return f"a card of {card['flops'] / 1e12:.0f} TFLOP/s and {card['bytes'] / 1e12:.2f} TB/s"


def choices() -> Iterator[str]:
    """A line for each comparison of several ways to compute the same."""
    update = record("update_forms_h200")
    rates = [form["tb_a_second"]["499998720"] for form in update["forms"]]
    yield f"- AdamW's kernel, compiled in {len(rates)} ways: {min(rates):.2f} to {max(rates):.2f} TB/s"
    loss = [form for form in record("loss_forms_h200")["forms"] if form["vocabulary"] == 128256]
    times = sorted(form["ms"] for form in loss)
    yield f"- The loss with its gradient, compiled in {len(loss)} ways: {times[0]:.2f} to {times[-1]:.2f} ms"
    norm = sorted(form["ms"] for form in record("norm_forms_h200")["forms"] if form["width"] == 4096)
    yield f"- A norm's backward beside a residual, 4,096 wide, in {len(norm)} ways: {norm[0]:.3f} to {norm[-1]:.3f} ms"
    forms = [form for form in record("embedding_forms_h200")["forms"] if "columns" in form]
    for ids in dict.fromkeys(form["ids"] for form in forms):
        times = sorted(form["ms"] for form in forms if form["ids"] == ids and form["table"][1] == 4096)
        yield f"- The embedding's gradient, ids {ids}, in {len(times)} ways: {times[0]:.2f} to {times[-1]:.2f} ms"
    attention: Any = record("attention_in_layers_h200")["in_layer"]
    gains = [sum(cudnn[6:]) / sum(fa4[6:]) for cudnn, fa4 in zip(attention["cudnn"], attention["fa4"], strict=True)]
    yield f"- FA4 in place of cuDNN, {len(gains)} shapes: {min(gains):.2f} to {max(gains):.2f} times as fast"


def page() -> str:
    """The whole page."""
    found = record("step_kernels_h200")
    rows = {row["case"]: row for row in found["rows"]}
    top = found["ceilings"]
    told = f"Where nothing else is said, {at_best(top)}."
    records = [
        "step_kernels_h200.json",
        "step_kernels_drawn_h200.json",
        "update_forms_h200.json",
        "loss_forms_h200.json",
        "norm_forms_h200.json",
        "embedding_forms_h200.json",
        "attention_in_layers_h200.json",
    ]
    sections = [section(name, rows, top) for name in CASES if name in rows]
    shares = [of_the_ceiling(rows[name], rows[name].get("ceilings", top)) for name in CASES if name in rows]
    sections.append(drawn_shapes([share for share in shares if share is not None]))
    listed = "\n".join(f"- {origin(file)}" for file in records)
    return "\n\n".join([INTRODUCTION, told, *sections, KEPT, "\n".join(choices()), f"Records:\n\n{listed}"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/kernels.md from the records in benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is not up to date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
    if not same:
        print("docs/kernels.md does not match the records; fix: python docs/kernels.py")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
