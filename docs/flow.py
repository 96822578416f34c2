"""Draws docs/flow.svg: from a model and a layout to what is predicted and what is run, with the numbers of one rank.

    python docs/flow.py

Every number is asked of the code: the preset `tiny`, rank 0 of tp=2,pp=2 with two micro-batches, 64 tokens.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "src"))

from penteract.config.hardware import cluster  # noqa: E402
from penteract.config.layout import Layout  # noqa: E402
from penteract.config.mesh import Mesh  # noqa: E402
from penteract.config.resolve.presets import TINY  # noqa: E402
from penteract.model.decoder import record  # noqa: E402
from penteract.readings.estimator import Estimator  # noqa: E402
from penteract.readings.explain.why import why  # noqa: E402
from penteract.readings.price import price  # noqa: E402
from penteract.step.arena import plan_arena  # noqa: E402
from penteract.step.program import compile_step  # noqa: E402

_STYLE = runpy.run_path(str(HERE / "picture.py"))
text, INK, FAINT, BOX, PAPER, MONO = (_STYLE[n] for n in ("text", "INK", "FAINT", "BOX", "PAPER", "MONO"))

WIDTH, HEIGHT = 1000, 330
TOKENS, LAYOUT = 64, Layout(tp=2, pp=2, gradient_accumulation_steps=2)
BLUE, GREEN, RED = "#2f6fbb", "#3a8f5c", "#c8553d"


def box(x: float, y: float, w: float, h: float, title: str, lines: tuple[str, ...], colour: str) -> list[str]:
    """A titled box; the last line is the file that makes it."""
    shape = f"x='{x}' y='{y}' width='{w}' height='{h}' rx='6'"
    out = [f"<rect {shape} fill='{BOX}' stroke='{colour}' stroke-width='1.6'/>"]
    out.append(text(x + w / 2, y + 20, title, size=15, fill=colour))
    for i, line in enumerate(lines):
        last = i == len(lines) - 1
        style = {"size": 10, "fill": FAINT, "font": MONO} if last else {"size": 12}
        out.append(text(x + w / 2, y + 40 + 17 * i, line, **style))
    return out


def arrow(x1: float, y1: float, x2: float, y2: float, verb: str = "") -> list[str]:
    """From one box to the next, with what happens on the way."""
    way = f"x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}'"
    out = [f"<line {way} stroke='{INK}' stroke-width='1.4' marker-end='url(#to)'/>"]
    return [*out, text((x1 + x2) / 2, (y1 + y2) / 2 - 6, verb, size=12, fill=INK)] if verb else out


def picture() -> str:
    """The SVG as text."""
    tape = record(TINY, Mesh(LAYOUT), 0, TOKENS).tape
    program = compile_step(TINY, LAYOUT, TOKENS, rank=0, precision="bf16")
    chunk, cost, arena = program.chunks[0], price(program), plan_arena(program)
    calls = sum(len(instructions) for instructions in chunk.actions.values())
    estimator = Estimator(TINY, cluster("4xH100"), TOKENS, "bf16")
    seconds = estimator.time(estimator.estimate(LAYOUT)).seconds
    terms = len(why(TINY, LAYOUT, TOKENS, "bf16").rows)
    wire = sum(cost.wires.values())
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}'>",
        "<defs><marker id='to' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0,0 L8,4 L0,8 z' fill='{INK}'/></marker></defs>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='{PAPER}'/>",
        *box(14, 20, 160, 92, "model + layout", ("tiny", "tp=2,pp=2, 2 steps", "config/"), BLUE),
        *arrow(174, 66, 232, 66, "record"),
        *box(232, 20, 160, 92, "tape", (f"{len(tape.ops)} ops", "shapes, no numbers", "model/ ops/do.py"), BLUE),
        *arrow(392, 66, 450, 66, "lower"),
        *box(450, 20, 160, 92, "chunk", (f"{calls} instructions", ", ".join(chunk.actions), "ops/lower.py"), BLUE),
        *arrow(610, 66, 668, 66, "compile"),
        *box(668, 20, 318, 92, "program of one rank",
             (f"{len(program.actions)} actions, {len(program.buckets)} buckets",
              "the order of a step, said once", "step/program.py schedule/ parallel/"), BLUE),
        *arrow(827, 112, 827, 150),
        text(500, 144, "walk (step/walk.py): one order, answered by every reading; time plays its events", size=13),
    ]  # fmt: skip
    readings = (
        ("price", (f"{sum(cost.resident.values()):,} bytes kept", f"{wire:,} on wires", "readings/price.py"), GREEN),
        ("explain", (f"{terms} terms, each with", "formula and line", "readings/explain/"), GREEN),
        ("time", (f"{seconds * 1e3:.2f} ms on 4xH100", "streams, overlap", "readings/time/"), GREEN),
        ("arena", (f"{arena.size:,} bytes", "an offset a register", "step/arena.py"), GREEN),
        ("run", ("tensors, kernels,", "collectives, update", "engine/executor/"), RED),
    )
    for i, (title, lines, colour) in enumerate(readings):
        x = 14 + 197 * i
        parts += [*arrow(x + 92, 156, x + 92, 182), *box(x, 182, 184, 92, title, lines, colour)]
    proof = "Green needs no torch and no GPU; tests observe the red and hold it equal to the green."
    parts.append(text(500, 306, proof, size=13, fill=FAINT))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    (HERE / "flow.svg").write_text(picture(), encoding="utf-8")
