"""One GPU: ways to compile the backward of a norm whose input a residual reads too: correctness and speed.

    python benchmarks/norm_forms.py --out FOLDER [--commit HASH] [--rows 16384] [--widths 4096,2048]

Writes FOLDER/norm_forms.json. Check (`held`): the gradient of some rows against fp64, by bf16's rounding; `same`: two runs agree
to the bit, and with the first form. `ms` is the median of ten times twenty launches over several inputs in turn, so that none
is in the cache. With `--device cpu --rows 5 --widths 70` the kernel runs in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from measuring import form_options, measured_on, run_parts, seconds

from penteract.engine.kernels.triton import fork_norm as kernel
from penteract.engine.kernels.triton.fork_norm import NormForm
from penteract.ops.declarations.fusions import PARTS

FORMS = tuple(NormForm(elements, stages) for elements in (16, 8) for stages in (0, 2, 3, 4))
CHECKED, IN_A_ROW, INPUTS = 64, 20, 4


def drawn(rows: int, width: int, device: torch.device) -> list[torch.Tensor]:
    """x, its scale, the gradients of the norm and of x's other reader."""
    x, g, other = (torch.randn(rows, 1, width, device=device, dtype=torch.bfloat16) for _ in range(3))
    return [x, (x.float().square().mean(-1) + 1e-5).rsqrt(), g, other]


def measured(form: NormForm, rows: int, width: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds, TB/s of three readings and one writing, and the largest difference to fp64."""
    torch.manual_seed(0)
    some, w = (
        [drawn(rows, width, device) for _ in range(INPUTS)],
        torch.rand(width, device=device).to(torch.bfloat16) + 0.5,
    )
    outs = [[torch.empty_like(some[0][0]), torch.empty(PARTS, width, device=device)] for _ in range(2)]
    wanted = [torch.empty_like(y) for y in outs[0]]

    def run(ins: list[torch.Tensor], out: list[torch.Tensor], form: NormForm = form) -> None:
        kernel.FORM, kernel.STAGED = form, 2**20  # as it is, whether it would be chosen or not
        kernel.fork_norm_input(None, None, ins, [w], out)  # type: ignore[arg-type]

    run(some[0], wanted, FORMS[0])
    for out in outs:
        run(some[0], out)
    same = all(torch.equal(a, b) for a, b in zip(*outs, strict=True)) and torch.equal(outs[0][0], wanted[0])
    x, scale, g, other = (t[:CHECKED, 0].double() for t in some[0])
    normed, slope = x * scale[:, None], g * w.double()
    want = (slope - normed * (slope * normed).mean(-1, keepdim=True)) * scale[:, None] + other
    off = ((outs[0][0][:CHECKED, 0].double() - want).abs() / (want.abs() + 1e-2)).max().item()
    turns = cycle(some)

    def several() -> None:
        for _ in range(IN_A_ROW):
            run(next(turns), outs[0])

    took = seconds(several, device.type) / IN_A_ROW
    moved = 4 * some[0][0].nbytes + outs[0][1].nbytes
    return {
        **asdict(form), "rows": rows, "width": width, "ms": 1e3 * took, "tb_a_second": moved / took * 1e-12, "off": off,
        "held": off < 2**-6, "same": same,
    }  # fmt: skip


def main() -> None:
    parser = form_options("Ways to compile the backward of a norm beside a residual.")
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--widths", default="4096,2048")
    args = parser.parse_args()
    device = torch.device(args.device)
    found: dict[str, Any] = {**measured_on(args), "forms": []}
    for width in map(int, args.widths.split(",")):
        for form in FORMS:
            about = (form, args.rows, width, device)
            found["forms"].append(run_parts(str(form), {"all": lambda about=about: measured(*about)})["all"])
            print(found["forms"][-1], flush=True)
            (args.out / "norm_forms.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
