"""A sweep with every kind of case, by the writers of `penteract bench`; and a table of others, with their words."""

from __future__ import annotations

import csv
import io
import random
from dataclasses import replace
from pathlib import Path

from measured_sweeps import case, row, sweep, written
from penteract.measure.schemas.sweep import State, Sweep, SweepRow

HOSTILE = "<img src=x onerror=alert(1)>"
STATES: dict[int, State] = {3: "out of memory", 7: "failed", 8: "failed", 10: "timed out", 12: "lost", 14: "skipped",
                            16: "pending", 18: "running"}  # fmt: skip
MESHES = [(dp, tp, 8 // dp // tp) for dp in (1, 2, 4, 8) for tp in (1, 2, 4) if dp * tp <= 8]


def drawn_sweep() -> Sweep:
    """Two cases of each mesh of 8 ranks. Tensor parallelism is slower than predicted; some cases end in other ways."""
    draw, rows = random.Random(22), list[SweepRow]()
    for number, (dp, tp, pp) in enumerate([mesh for mesh in MESHES for _ in (1, 2)], 1):
        predicted = 1.0 + 0.1 * pp + 0.05 * tp + 0.02 * (number % 2)
        one = case(number, step_s=predicted, dp=dp, tp=tp, pp=pp, micro_batch_size=1 + number % 2)
        if number == 1:
            one = replace(one, name=HOSTILE)
        took = predicted * (1 + 0.05 * tp) * (1 + 0.01 * draw.random())
        if number in STATES:
            rows.append(row(one, state=STATES[number]))
        else:
            void = "the loss is not finite" if number == 5 else ""
            rows.append(row(one, [took, 1.01 * took, 0.99 * took], mfu=0.4 / took, void=void))
    return sweep(*rows)


def drawn_folder(folder: Path) -> Path:
    """A folder with that sweep, and a smaller, older one."""
    written(sweep(*drawn_sweep().rows[1:4]), folder / "older")
    written(drawn_sweep(), folder / "eight ranks")
    return folder


def drawn_csv(rows: int = 60, mark: str = ",") -> str:
    """A table of others: other names of columns, other words for states, hostile texts."""
    draw, text = random.Random(7), io.StringIO()
    out = csv.writer(text, delimiter=mark)
    out.writerow(["model_label", "nodes", "dp", "tp", "pp", "status", "mfu_pct", "tokens_per_s_per_gpu",
                  "gpu_memory_GB", "note"])  # fmt: skip
    for i in range(rows):
        dp, tp, pp = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4]), draw.choice([1, 2])
        rate = 9000 / tp**0.3 / pp**0.2 * (1 + 0.1 * draw.random())
        good = i % 5 > 0
        out.writerow([
            "1B" if i % 2 else "8B", max(1, dp * tp * pp // 8), dp, tp, pp, "completed" if good else "OOM",
            f"{rate / 250:.3f}" if good else "", f"{rate:.2f}" if good else "", f"{80 / tp / pp:.2f}" if good else "",
            HOSTILE if i == 3 else '=cmd|"x"',
        ])  # fmt: skip
    return text.getvalue()
