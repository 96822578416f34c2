"""The pipeline's schedule of a layout, drawn as wide as the terminal."""

from __future__ import annotations

import shutil

from penteract.config.layout import Layout
from penteract.schedule.draw import draw
from penteract.schedule.registry import generate


def drawing(layout: Layout) -> str:
    """A line for each pipeline rank."""
    micros = layout.gradient_accumulation_steps
    lists = generate(layout.schedule, layout.pp, layout.vpp, micros)
    return draw(lists, layout.placement, micros, width=shutil.get_terminal_size().columns)
