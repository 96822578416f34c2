"""Take the pictures of the explorer in `images/`: needs a browser, and playwright. A profile is measured for its own.

python docs/screenshots.py [NAME …]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from palette import reduced  # noqa: E402
from recorded_cases import recorded_csv  # noqa: E402

from browsers import WINDOWED, browser_path  # noqa: E402
from explore.drawn_questions import question  # noqa: E402
from explore.opened import opened  # noqa: E402
from explore.served import served  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SPLIT = question("llama-3.1-8b", "dp=2,tp=2,pp=4,mbs=1,zero=1,schedule=zb_h1", gpu="H200", global_batch_size=64)
CHUNKS = question("llama-3.1-70b", "dp=2,tp=4,pp=8,vpp=2,schedule=interleaved,mbs=1,zero=1", gpu="H200",
                  global_batch_size=64)  # fmt: skip
PIPELINE = question("llama-3.1-405b", "dp=8,tp=8,pp=8,mbs=1,zero=1,recompute=tp_all_gather+rms_norm+swiglu", gpu="H200",
                    global_batch_size=512)  # fmt: skip
LARGE = question("llama-3.1-405b", "dp=64,tp=8,pp=8,mbs=1,zero=1", gpu="H200", global_batch_size=2048)
EXPERTS = question("qwen3-30b-a3b", "dp=16,ep=8,tp=2,mbs=1,zero=1", gpu="H200", global_batch_size=64)
COMPARED = {"fix": {}, "tokens": "15T", "usd_per_gpu_hour": 2.5,
            "against": {"dp": 4, "pp": 2, "schedule": "interleaved", "vpp": 8, "micro_batch_size": 2,
                        "zero": 1}}  # fmt: skip
# Runs that any machine can train in a minute: of two learning rates.
TRAINED = ("--preset", "tiny", "--steps", "40", "training.validation_every=8", "batch.global_batch_size=4",
           "batch.micro_batch_size=4", "batch.sequence_length=128")  # fmt: skip
RATES = {"slow": "1e-3", "fast": "1e-2"}
# Other parts of the state.
STATES = {"layouts_dark": {"search": COMPARED}, "ranks_light": {"rank": 1000},
          "ranks_dark": {"rank": 13, "parameter": "layers.0.moe.experts.up"},
          "bench_light": {"bench": {"file": {"name": "planned_steps_4xh200.csv", "text": recorded_csv()}}},
          "bench_dark": {"bench": {"file": {"name": "planned_steps_4xh200.csv", "text": recorded_csv()}}},
          "runs_light": {"runs": list(RATES)},
          "profile_dark": {"profile": {"zoom": [0.25, 0.3125]}}}  # fmt: skip
# What is ready when the picture can be taken; of other views all that is asked for.
READY = {
    "ranks": "#mesh canvas",
    "profile": "#profile-lanes canvas",
    "bench": "#cases",
    "runs": "#curve-train-loss polyline >> nth=1",
}
# A run of two ranks that any machine can profile.
PROFILED = ("--preset", "tiny", "parallel.dp=2", "parallel.zero=1", "model.layers=4", "model.hidden_size=512",
            "model.ffn_size=1536", "model.heads=8", "batch.sequence_length=512", "batch.micro_batch_size=1",
            "batch.global_batch_size=4", "precision.device=cpu")  # fmt: skip
SCROLLED = {"schedules_narrow": "#lanes", "layouts_dark": "#waterfall", "profile_dark": "#profile-lanes",
            "bench_light": "#heat", "bench_dark": "#residuals"}  # fmt: skip
WHOLE = (
    "memory_light",
    "memory_dark",
    "schedules_light",
    "schedules_dark",
    "ranks_dark",
)  # not only what the window shows
# name -> the question, and options of the browser; the view is the first word of the name
PICTURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "memory_light": (question(), {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"}),
    "memory_dark": (PIPELINE, {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"}),
    "memory_narrow": (question(), {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"}),
    "memory_wide": (PIPELINE, {"viewport": {"width": 2560, "height": 1440}, "color_scheme": "light"}),
    "schedules_light": (SPLIT, {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"}),
    "schedules_dark": (CHUNKS, {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"}),
    "layouts_light": (question(), {"viewport": {"width": 1240, "height": 1060}, "color_scheme": "light"}),
    "layouts_dark": (question(), {"viewport": {"width": 1040, "height": 620}, "color_scheme": "dark"}),
    "schedules_narrow": (SPLIT, {"viewport": {"width": 380, "height": 844}, "color_scheme": "light"}),
    "ranks_light": (LARGE, {"viewport": {"width": 1240, "height": 1060}, "color_scheme": "light"}),
    "runs_light": (question(), {"viewport": {"width": 1240, "height": 1100}, "color_scheme": "light"}),
    "bench_light": (question(), {"viewport": {"width": 1240, "height": 1160}, "color_scheme": "light"}),
    "bench_dark": (question(), {"viewport": {"width": 1240, "height": 1000}, "color_scheme": "dark"}),
    "ranks_dark": (EXPERTS, {"viewport": {"width": 1240, "height": 900}, "color_scheme": "dark"}),
    "profile_light": (question(), {"viewport": {"width": 1240, "height": 1180}, "color_scheme": "light"}),
    "profile_dark": (question(), {"viewport": {"width": 1240, "height": 960}, "color_scheme": "dark"}),
}


def main() -> None:
    """Take those that are named, or all."""
    IMAGES.mkdir(exist_ok=True)
    names = sys.argv[1:] or [*PICTURES]
    with tempfile.TemporaryDirectory() as folder:
        measure(folder, names)
        take(folder, names)


def measure(folder: str, names: list[str]) -> None:
    """Profile and train what the pictures show."""
    for kind in ("profiles", "runs"):
        Path(folder, kind).mkdir()
    penteract = (sys.executable, "-m", "penteract")
    if any(name.startswith("profile") for name in names):
        subprocess.run([*penteract, "profile", *PROFILED, "--out", f"{folder}/profiles/tiny"], check=True)
    for rate, number in RATES.items() if any(name.startswith("runs") for name in names) else ():
        words = [f"optimizer.learning_rate={number}", "--into", f"{folder}/runs/{rate}"]
        subprocess.run([*penteract, "train", *TRAINED, *words], check=True)


def take(folder: str, names: list[str]) -> None:
    """The pictures."""
    folders = ("--profiles", f"{folder}/profiles", "--runs", f"{folder}/runs")
    with sync_playwright() as playwright, served(*folders) as running:
        running.open()
        browser = playwright.chromium.launch(executable_path=browser_path(WINDOWED), args=["--no-sandbox"])
        empty = browser.new_page()
        for name in names:
            asked, how = PICTURES[name]
            with opened(browser, running, **how) as page:
                page.go(asked, view=name.split("_")[0], **STATES.get(name, {}))
                ready = READY.get(name.split("_")[0])
                page.page.wait_for_selector(ready, timeout=60_000) if ready else page.rested()
                if figure := SCROLLED.get(name):
                    page.page.eval_on_selector(figure, "(figure) => figure.scrollIntoView()")
                page.page.wait_for_timeout(1000)
                png = page.page.screenshot(full_page=name in WHOLE)
                (IMAGES / f"{name}.png").write_bytes(reduced(empty, png))
        browser.close()


if __name__ == "__main__":
    main()
