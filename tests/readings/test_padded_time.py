"""What moves only the rows that came takes the time of these; what goes over a register takes that of its room."""

from __future__ import annotations

from dataclasses import replace

from penteract.config.hardware import cluster
from penteract.config.layout import EVERY_FUSION, Layout
from penteract.config.resolve.presets import preset
from penteract.readings.estimator import Estimator

MODEL = replace(preset("qwen3-30b-a3b").model, layers=2)
LAYOUT = Layout(dp=8, ep=8, ep_method="all_gather", experts="quack", elementwise="triton", attention="cudnn",
                loss="chunked", fuse=EVERY_FUSION, zero=1)  # fmt: skip


def seconds(layout: Layout) -> float:
    prices = Estimator(MODEL, cluster("8xH200"), 4096, "bf16")
    return prices.time(prices.estimate(layout)).seconds


def more(layout: Layout) -> float:
    """Seconds that padded rows take more."""
    return seconds(replace(layout, expert_rows="padded")) - seconds(layout)


def test_kernels_that_count_rows_take_no_more() -> None:
    """Less: the host waits for nothing."""
    assert more(LAYOUT) < 0


def test_what_goes_over_all_room_takes_longer() -> None:
    summed = replace(LAYOUT, fuse=tuple(f for f in EVERY_FUSION if f != "glu"))  # two gradients of an expert's input
    assert more(summed) > 0
    assert more(replace(LAYOUT, experts="grouped")) > more(summed)  # results are copied, too
    assert more(replace(LAYOUT, elementwise="reference", fuse=())) > more(summed)
