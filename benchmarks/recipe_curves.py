"""Losses of one model in each precision recipe, with the same initial weights and the same text, and a plot of them.

    python benchmarks/recipe_curves.py --out FOLDER [--only fp8_blockwise,fp8_delayed]           # on one GPU
    python benchmarks/recipe_curves.py --draw benchmarks/results/recipe_curves_1b_h200.json [--add FOLDER/recipe_curves.json]

The text is tokenised as bytes, but the vocabulary is that of the model, so most of its rows are never used. The plot is an
SVG file next to the record: for each recipe the mean loss of 10 steps, and below the difference from bf16.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

from provenance import hexadecimal

RECIPES = ("bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "fp8_delayed", "bf16_pure", "fp16")
COLOURS = ("#222222", "#d1495b", "#edae49", "#00798c", "#7a5195", "#66a182", "#2e86de")
SMOOTH = 10  # steps


def train(args: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """Train with a recipe. -> its row"""
    import torch

    from penteract.config.catalog import model as find_model
    from penteract.config.layout import Layout
    from penteract.config.run import Data, LearningRateSchedule, Optimizer, Precision, RunSpec
    from penteract.engine.data import open_samples, open_tokenizer
    from penteract.engine.rank.rank import join
    from penteract.engine.session import trainer as engine

    lay = Layout(attention="cudnn", loss="chunked", elementwise="triton", gradient_accumulation_steps=args.sequences)
    run = RunSpec(
        model=find_model(args.model), layout=lay, sequence_length=args.seq, data=Data(pack_documents=False),
        optimizer=Optimizer(learning_rate=args.rate), lr_schedule=LearningRateSchedule(warmup_steps=20),
        precision=Precision(dtype=recipe),  # type: ignore[arg-type]
    )  # fmt: skip
    samples, _ = open_samples(run.data, open_tokenizer(run.tokenizer), run.sequence_length, 0)
    trainer = engine.Trainer.build(run, join(os.environ, "cuda"))
    losses = list[float]()
    begun = time.monotonic()
    for n in range(1, args.steps + 1):
        losses.append(trainer.step(n, samples, (n - 1) * lay.global_batch_size).loss)
    seconds = time.monotonic() - begun
    return {"recipe": recipe, "losses": losses, "seconds": seconds,
            "allocated_gib": torch.cuda.max_memory_allocated() / 2**30}  # fmt: skip


def smooth(losses: list[float]) -> list[float]:
    """The mean of the last 10 losses at each step."""
    return [fmean(losses[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(losses))]


def draw(record: dict[str, Any]) -> str:
    """The record as an SVG: losses above, differences from the first recipe below."""
    rows = [r for r in record["rows"] if "losses" in r]
    curves = {r["recipe"]: smooth(r["losses"]) for r in rows}
    first = next(iter(curves.values()))
    apart = {name: [100 * (y / x - 1) for x, y in zip(first, c, strict=True)] for name, c in curves.items()}
    width, left, out = 820, 60, list[str]()

    def panel(series: dict[str, list[float]], top: int, height: int, title: str) -> None:
        low, high = min(min(c) for c in series.values()), max(max(c) for c in series.values())
        n, span = len(first), (high - low) or 1.0

        def at(i: int, y: float) -> str:
            return f"{left + (width - left - 150) * i / (n - 1):.1f},{top + height * (high - y) / span:.1f}"

        out.append(f'<text x="{left}" y="{top - 8}" font-weight="bold">{title}</text>')
        for k in range(5):
            y = low + span * k / 4
            place = top + height * (high - y) / span
            out.append(f'<line x1="{left}" x2="{width - 150}" y1="{place:.1f}" y2="{place:.1f}" stroke="#ddd"/>')
            out.append(f'<text x="{left - 6}" y="{place + 4:.1f}" text-anchor="end">{y:.2f}</text>')
        for (name, c), colour in zip(series.items(), COLOURS, strict=False):
            points = " ".join(at(i, y) for i, y in enumerate(c))
            out.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.4" points="{points}"/>')
            place = top + 14 + 16 * list(series).index(name)
            out.append(f'<text x="{width - 142}" y="{place}" fill="{colour}">{name} {c[-1]:.2f}</text>')

    title = f"{record['model']}, {record['sequence_length']} tokens, {record['sequences_a_step']} sequences a step"
    panel(curves, 60, 260, f"loss, mean of {SMOOTH} steps: {title}, {record['device']}")
    panel(apart, 380, 160, f"percent from {rows[0]['recipe']}")
    out.append(f'<text x="{left}" y="566">{len(first)} steps</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 580" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *out, "</svg>", ""])


def join_rows(record: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`record` with the rows of `more`, in the order of `RECIPES`. The new rows contain the commit of `more`."""
    same = ("model", "sequence_length", "sequences_a_step", "rate", "device", "torch")
    if unlike := [key for key in same if record[key] != more[key]]:
        raise SystemExit(f"found records that differ in {', '.join(unlike)}: only records of one case can be joined")
    new = {row["recipe"]: row | {"commit": more["commit"], "date": more["date"]} for row in more["rows"]}
    rows = {row["recipe"]: row for row in record["rows"]} | new
    return record | {"rows": sorted(rows.values(), key=lambda row: RECIPES.index(row["recipe"]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=2, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--seconds", type=float, default=1e9, help="no recipe begins after so many seconds")
    parser.add_argument("--commit", default="", type=hexadecimal, help="for the record")
    parser.add_argument("--only", default=",".join(RECIPES), help="recipes to train")
    parser.add_argument("--draw", type=Path, help="draw this record, and train nothing")
    parser.add_argument("--add", type=Path, help="a record of the same case, whose rows are added to that of --draw")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.draw:
        record = json.loads(args.draw.read_text())
        if args.add:
            record = join_rows(record, json.loads(args.add.read_text()))
            args.draw.write_text(json.dumps(record, indent=1) + "\n")
        args.draw.with_suffix(".svg").write_text(draw(record))
        return
    import torch

    torch.set_grad_enabled(False)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    record: dict[str, Any] = {
        "case": "recipes of precision", "model": args.model, "sequence_length": args.seq,
        "sequences_a_step": args.sequences, "rate": args.rate, "commit": args.commit or git.stdout.strip(),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
        "rows": [],
    }  # fmt: skip
    begun = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    for recipe in args.only.split(","):
        if time.monotonic() - begun > args.seconds:
            break
        try:
            row = train(args, recipe)
        except Exception:
            row = {"recipe": recipe, "failed": traceback.format_exc()[-1500:]}
        record["rows"].append(row)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        last = row.get("losses", [0.0])[-1]
        print(round(time.monotonic() - begun), recipe, round(last, 4), row.get("failed", ""), flush=True)
        (args.out / "recipe_curves.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
