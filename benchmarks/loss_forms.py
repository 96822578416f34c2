"""One GPU: ways to compile the kernel of the loss with its gradient: correctness and speed.

    python benchmarks/loss_forms.py --out FOLDER [--commit HASH] [--rows 8192] [--columns 128256,151936]

Writes FOLDER/loss_forms.json. Check (`held`): loss and gradient of some rows against fp64; the gradient by bf16's rounding.
With `--device cpu --rows 3 --columns 700` the kernel runs in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from measuring import run_parts, seconds
from provenance import hexadecimal

from penteract.engine.kernels.triton import loss_and_gradient as kernel
from penteract.engine.kernels.triton.loss_and_gradient import Form

FORMS = (
    Form(16384, 16384, 32), Form(32768, 8192, 32), Form(32768, 16384, 32), Form(65536, 8192, 32), Form(16384, 32768, 32),
    Form(32768, 32768, 32), Form(8192, 16384, 32), Form(16384, 16384, 16), Form(8192, 8192, 16), Form(8192, 8192, 8),
    Form(4096, 4096, 8),
)  # fmt: skip
CHECKED = 64  # rows


def measured(form: Form, rows: int, columns: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds, TB/s of one reading and one writing, and the largest differences to fp64."""
    kernel.FORM = form
    logits = torch.randn(rows, 1, columns, device=device, dtype=torch.bfloat16) * 4
    targets = torch.randint(0, columns, (rows, 1), device=device)
    g, out = torch.full((), 1 / rows, device=device), torch.empty((), device=device)
    some = logits[:CHECKED, 0].double()
    want = some.softmax(-1)
    want[torch.arange(len(some)), targets[:CHECKED, 0]] -= 1
    losses = logits[:, 0].float().logsumexp(-1) - logits[:, 0].gather(1, targets)[:, 0].float()
    site: Any = SimpleNamespace(attrs={})

    def run() -> None:
        kernel.loss_and_gradient(None, site, [logits, targets, g], [], [out])  # type: ignore[arg-type]

    run()
    made = logits[:CHECKED, 0].double() * rows
    off = ((made - want).abs() / (want.abs() + 1e-30)).max().item()
    loss = abs(out.item() / losses.double().sum().item() - 1)
    took = seconds(run, device.type)
    return {
        **asdict(form), "rows": rows, "vocabulary": columns, "ms": 1e3 * took, "tb_a_second": 2 * logits.nbytes / took * 1e-12,
        "off": off, "loss_off": loss, "held": off < 2**-7 and loss < 1e-5,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Ways to compile the kernel of the loss with its gradient.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", type=hexadecimal, default="")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", default="128256,151936")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    rows = list[dict[str, Any]]()
    for columns in map(int, args.columns.split(",")):
        for form in FORMS:
            row = run_parts(str(form), {"all": lambda form=form, n=columns: measured(form, args.rows, n, device)})
            rows.append(row["all"])
            print(row["all"], flush=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    found = {"commit": args.commit, "device": name, "torch": torch.__version__, "forms": rows}
    (args.out / "loss_forms.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
