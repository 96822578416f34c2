"""One GPU: ways to compile the kernel of the loss with its gradient: correctness and speed.

    python benchmarks/loss_forms.py --out FOLDER [--commit HASH] [--rows 8192] [--columns 128256,151936] [--forms TEXT]

Writes FOLDER/loss_forms.json. Check (`held`): loss and gradient of some rows against fp64, the gradient by bf16's rounding;
`same`: two runs on the same logits agree to the bit. `ms` is the median of ten times five launches in a row; `sustained_ms`
the mean of a second of them, as the card's power allows. `quack`, where the package is, is its cross entropy with the
gradient in place, after a kernel that takes the targets' logits aside. `--forms` takes those whose name contains a text.
With `--device cpu --rows 3 --columns 700` the kernels run in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from measuring import form_options, measured_on, run_parts, seconds

from penteract.engine.kernels.triton.fused_loss import loss_and_gradient as kernel
from penteract.engine.kernels.triton.fused_loss.loss_and_gradient import LossForm
from penteract.engine.kernels.triton.fused_loss.shared_rows import SharedForm

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]  # logits, targets, g, out

FORMS = (
    LossForm(), LossForm(holds=True), LossForm(stages=2), LossForm(stages=3, holds=True), LossForm(16384, 8192, 32, stages=4, holds=True),
    LossForm(32768, 8192, 32), SharedForm(8192, 4), SharedForm(8192, 8), SharedForm(4096, 4), SharedForm(4096, 2), SharedForm(16384, 8),
    SharedForm(16384, 16),
)  # fmt: skip
CHECKED, IN_A_ROW, SUSTAINED = 64, 5, 1.0  # rows; launches; seconds


def ours(
    form: LossForm | SharedForm, logits: torch.Tensor, targets: torch.Tensor, g: torch.Tensor, out: torch.Tensor
) -> None:
    """A form of the project's kernel."""
    kernel.FORM = form
    site: Any = SimpleNamespace(attrs={})
    kernel.loss_and_gradient(None, site, [logits, targets, g], [], [out])  # type: ignore[arg-type]


def by_quack(logits: torch.Tensor, targets: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> None:
    """quack's: `g` as a weight of all classes, and the loss from its log-sum-exp, as its own would be scaled too."""
    x, t = logits[:, 0], targets[:, 0]
    own = x.gather(1, t[:, None])[:, 0].float()
    losses, log_sums = torch.empty_like(own), torch.empty_like(own)
    weights = g.expand(x.shape[1]).contiguous()
    import_module("quack.cross_entropy").cross_entropy_fwd_out(x, t, own, losses, log_sums, x, weights, -1)
    torch.sum(log_sums - own, 0, out=out)


def sustained(run: Callable[[], Any]) -> float:
    """Seconds of a run among many, without a pause between them."""
    begun, times = time.perf_counter(), 0
    while time.perf_counter() - begun < SUSTAINED:
        for _ in range(50):
            run()
        torch.cuda.synchronize()
        times += 50
    return (time.perf_counter() - begun) / times


def measured(run: Run, rows: int, columns: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds, TB/s of one reading and one writing, and the largest differences to fp64."""
    logits = torch.randn(rows, 1, columns, device=device, dtype=torch.bfloat16) * 4
    targets = torch.randint(0, columns, (rows, 1), device=device)
    g, out = torch.full((), 1 / rows, device=device), torch.empty((), device=device)
    again, twice = logits.clone(), torch.empty_like(out)
    some = logits[:CHECKED, 0].double()
    want = some.softmax(-1)
    want[torch.arange(len(some)), targets[:CHECKED, 0]] -= 1
    losses = logits[:, 0].float().logsumexp(-1) - logits[:, 0].gather(1, targets)[:, 0].float()
    run(logits, targets, g, out)
    run(again, targets, g, twice)
    made = logits[:CHECKED, 0].double() * rows
    off = ((made - want).abs() / (want.abs() + 1e-30)).max().item()
    loss = abs(out.item() / losses.double().sum().item() - 1)
    same = torch.equal(again, logits) and torch.equal(out, twice)
    del again, some, want, made

    def several(times: int) -> None:
        for _ in range(times):
            run(logits, targets, g, out)

    took = seconds(lambda: several(IN_A_ROW), device.type) / IN_A_ROW
    long = sustained(lambda: several(1)) if device.type == "cuda" else took
    return {
        "rows": rows, "vocabulary": columns, "ms": 1e3 * took, "sustained_ms": 1e3 * long, "tb_a_second": 2 * logits.nbytes / took * 1e-12,
        "off": off, "loss_off": loss, "held": off < 2**-7 and loss < 1e-5, "same": same,
    }  # fmt: skip


def named() -> dict[str, tuple[dict[str, Any], Run]]:
    """By name: how it is compiled, and what runs it."""
    found: dict[str, tuple[dict[str, Any], Run]] = {str(form): (asdict(form), partial(ours, form)) for form in FORMS}
    return found | ({"quack": ({}, by_quack)} if find_spec("quack") else {})


def main() -> None:
    parser = form_options("Ways to compile the kernel of the loss with its gradient.")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", default="128256,151936")
    parser.add_argument("--forms", default="")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    rows = list[dict[str, Any]]()
    for columns in map(int, args.columns.split(",")):
        for form, (about, run) in named().items():
            if args.forms not in form:
                continue
            row = run_parts(form, {"all": lambda run=run, n=columns: measured(run, args.rows, n, device)})["all"]
            rows.append({"form": form.partition("(")[0], **about, **row})
            print(rows[-1], flush=True)
            found = {**measured_on(args), "forms": rows}
            (args.out / "loss_forms.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
