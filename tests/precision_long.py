"""Every recipe for 300 steps beside fp32, on text: within 2 % of its loss. Run by `make test-all`.

Losses are means of the last 20 steps, so that one batch is not what is compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

import torch

from penteract.config.layout import Layout
from penteract.config.precision.policy import RECIPES
from precisions import POLICIES, Small
from tolerances import DRIFT

STEPS, LAST = 300, 20
RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "precision_300.json"


def last_loss(name: str) -> float:
    run = Small((RECIPES | POLICIES)[name], steps=STEPS, layout=Layout(micro_batch_size=8))
    return fmean(run.losses()[-LAST:])


def main() -> int:
    torch.set_num_threads(1)
    names = ["fp32", *sorted(POLICIES)]
    losses: dict[str, float] = {}
    for name in names:
        losses[name] = last_loss(name)
        print(f"{losses[name]:.4f}  {losses[name] / losses['fp32'] - 1:+.2%}  {name}", flush=True)
    far = {name: loss for name, loss in losses.items() if not abs(loss / losses["fp32"] - 1) < DRIFT[STEPS]}
    RESULT.write_text(
        json.dumps({"steps": STEPS, "last": LAST, "within": DRIFT[STEPS], "losses": losses}, indent=1) + "\n"
    )
    print(f"red: {far}" if far else f"all within {DRIFT[STEPS]:.0%} of fp32")
    return bool(far)


if __name__ == "__main__":
    sys.exit(main())
