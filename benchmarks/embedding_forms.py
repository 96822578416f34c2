"""One GPU: ways to compile the gradient of a table of embeddings: correctness and speed, and what its sort takes.

    python benchmarks/embedding_forms.py --out FOLDER [--commit HASH] [--shapes 128256x4096,128256x2048] [--tokens 16384]

Writes FOLDER/embedding_forms.json. Ids are drawn evenly, and as words of a text are: some are frequent. Check (`held`): the
table against fp64 within the rounding of fp32, and all else zero; `same`: two runs agree to the bit. `ms` is a call that
adds to a table, `first_ms` one that clears the rows in use before, `sort_ms` the sort in either, `clear_ms` clearing all
rows. `readers`: the norm and AdamW's update of such a table, reading all of its gradient, and the rows in use alone.
With `--device cpu` the kernels run in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

import torch
from measuring import form_options, measured_on, run_parts, seconds

from penteract.engine.kernels.triton import embedding as kernel
from penteract.engine.kernels.triton.embedding import EmbeddingForm
from penteract.engine.kernels.triton.optimizer import adamw
from penteract.engine.kernels.triton.optimizer.sum_of_squares import Squares
from penteract.step.clear_rows import ClearRows

FORMS = (
    EmbeddingForm(2048, 8, 4), EmbeddingForm(2048, 4, 4), EmbeddingForm(1024, 8, 4), EmbeddingForm(1024, 8, 2), EmbeddingForm(512, 8, 2),
    EmbeddingForm(4096, 8, 8), EmbeddingForm(4096, 4, 8),
)  # fmt: skip
IN_A_ROW = 10  # launches


def drawn(how: str, tokens: int, rows: int) -> torch.Tensor:
    """Ids [tokens, 1]: each as likely, or the i-th with a frequency of 1/i, in no order."""
    generator = torch.Generator().manual_seed(0)
    if how == "even":
        return torch.randint(0, rows, (tokens, 1), generator=generator)
    weights = 1 / torch.arange(1, rows + 1)
    found = torch.multinomial(weights[torch.randperm(rows, generator=generator)], tokens, True, generator=generator)
    return found[:, None]


def measured(form: EmbeddingForm, how: str, tokens: int, rows: int, width: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of the parts, and the largest difference to fp64."""
    kernel.FORM = form
    ids = drawn(how, tokens, rows).to(device)
    g = torch.randn(tokens, 1, width, device=device, dtype=torch.bfloat16)
    table, twice = (torch.full((rows, width), torch.nan, device=device) for _ in range(2))
    table.zero_()  # as a run's are before its first step
    site: Any = SimpleNamespace(attrs={"axis": ""}, params=("table",))
    env: Any = SimpleNamespace(clear_rows=frozenset({"table"}))
    dense: Any = SimpleNamespace(clear_rows=frozenset())

    def run(into: torch.Tensor, *, add: bool, env: Any = env, times: int = 1) -> None:
        for _ in range(times):
            kernel.embedding_weight(env, site, [ids, g], [into], add)

    run(table, add=False)
    run(table, add=False)
    run(twice, add=False, env=dense)
    same = torch.equal(table, twice)
    wanted, some = torch.unique(ids[:512, 0]), torch.zeros(min(512, tokens), width, device=device, dtype=torch.float64)
    for i, one in enumerate(wanted.tolist()):
        some[i] = g[ids[:, 0] == one, 0].double().sum(0)
    some = some[: len(wanted)]
    off = ((table[wanted].double() - some).abs().max() / some.abs().max()).item()
    empty = torch.ones(rows, dtype=torch.bool, device=device)
    empty[ids[:, 0]] = False
    clean = not table[empty].any().item()
    narrow, order = ids[:, 0].to(torch.int32), torch.empty_like(ids[:, 0])
    sorted_ids = torch.empty_like(narrow)

    def sort() -> None:
        for _ in range(IN_A_ROW):
            torch.sort(narrow, stable=True, out=(sorted_ids, order))

    whole = seconds(lambda: run(table, add=True, times=IN_A_ROW), device.type) / IN_A_ROW
    first = seconds(lambda: run(table, add=False, times=IN_A_ROW), device.type) / IN_A_ROW
    return {
        **asdict(form), "ids": how, "tokens": tokens, "table": [rows, width], "ms": 1e3 * whole, "first_ms": 1e3 * first,
        "sort_ms": 1e3 * seconds(sort, device.type) / IN_A_ROW, "clear_ms": 1e3 * seconds(table.zero_, device.type),
        "off": off, "held": off < 1e-5 and clean, "same": same,
    }  # fmt: skip


def readers(how: str, tokens: int, rows: int, width: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of the norm and of the update, which read all of a table's gradient, or the rows in use; `same`: they
    make the same to the bit."""
    gradient = torch.zeros(rows, width, device=device)
    gradient[drawn(how, tokens, rows).to(device)[:, 0].unique()] = 1.5
    flat, of_table = gradient.flatten(), ClearRows(0, rows * width, width)
    found, ends = dict[str, Any](), list[list[torch.Tensor]]()
    for name, part in (("all", None), ("in use", of_table)):
        mean, square, low = torch.zeros_like(flat), torch.zeros_like(flat), torch.zeros_like(flat, dtype=torch.int16)
        weights = torch.ones_like(flat, dtype=torch.bfloat16)
        factors = torch.tensor([1.0, 0.5, 0.1, 0.9, 0.8, 0.99, 1e-2], device=device)
        state, nonfinite, total = (
            (mean, square, low, weights, factors),
            torch.zeros((), device=device),
            torch.zeros((), device=device),
        )

        def update(state: Any = state, nonfinite: Any = nonfinite, part: Any = part) -> None:
            adamw.update(flat, *state, nonfinite, (0.1, 1e-8), decay=True, rows=part)

        def norm(total: torch.Tensor = total, part: Any = part) -> None:
            squares = Squares()
            squares.add(flat, part)
            squares.total(total.zero_())

        update()
        norm()
        ends.append([mean.clone(), weights.clone(), total.clone()])
        found |= {
            f"norm, {name}": 1e3 * seconds(norm, device.type),
            f"update, {name}": 1e3 * seconds(update, device.type),
        }
    same = all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    return {"ids": how, "tokens": tokens, "table": [rows, width], "ms": found, "same": same}


def main() -> None:
    parser = form_options("Ways to compile the gradient of a table of embeddings.")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--shapes", default="128256x4096,128256x2048")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    found: dict[str, Any] = {**measured_on(args), "forms": [], "readers": []}
    for shape in args.shapes.split(","):
        rows, width = map(int, shape.split("x"))
        for how in ("even", "as text"):
            for form in FORMS:
                about = (form, how, args.tokens, rows, width, device)
                found["forms"].append(run_parts(str(form), {"all": lambda about=about: measured(*about)})["all"])
                print(found["forms"][-1], flush=True)
            about = (how, args.tokens, rows, width, device)
            found["readers"].append(run_parts(how, {"all": lambda about=about: readers(*about)})["all"])
            print(found["readers"][-1], flush=True)
    (args.out / "embedding_forms.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
