"""docs/benchmarks.md and docs/kernels.md are what the records give; the pages are short enough, and what they name
exists."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penteract.planner.plan import PLAIN_KERNELS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("benchmarks/", "docs/", "examples/", "src/", "tests/")


def planned_times() -> dict[str, Any]:
    """The groups of planned_times.json: milliseconds planned and measured, by row."""
    return json.loads((RESULTS / "planned_times.json").read_text(encoding="utf-8"))["groups"]


@pytest.mark.parametrize("script", ["benchmarks/tables.py", "docs/kernels.py"])
def test_page_is_what_the_records_give(script: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_record_is_in_a_page() -> None:
    pages = "".join(
        (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("benchmarks", "kernels", "accuracy")
    )
    assert [path.name for path in RESULTS.iterdir() if f"results/{path.name})" not in pages] == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    links = [page.parent / link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    named = [ROOT / path for path in re.findall(r"`([\w./-]+)`", text) if path.startswith(FOLDERS)]
    assert [str(path) for path in (*links, *named) if not path.exists()] == []


def test_planner_warns_of_plain_kernels_as_the_record_says() -> None:
    """On one GPU, steps of plain torch's element-wise kernels over the planned time."""
    rows = json.loads((RESULTS / "bench_one_card_options_h200.json").read_text(encoding="utf-8"))["rows"]
    plain = [row for row in rows if 'kernels.elementwise="reference"' in row["settings"]]
    bf16, fp8 = (f"{row['median_ms'] / row['planned_ms']:.2f}" for row in plain)
    assert f"took {bf16} times as long as planned in bf16, and {fp8} times in FP8" in PLAIN_KERNELS


def test_what_is_planned_for_records_is_what_the_record_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every row that needs no other file; their memory is as it was recorded, to the byte."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    script = importlib.import_module("planned_times")
    record = planned_times()
    # Steps with `elementwise = "triton"` were timed when that meant quantisation and the update alone. What is planned
    # for such layouts now is of other kernels, so those records keep what was planned for them then.
    now = {"planned_steps_4xh200": script.planned(), "flash_attention": script.one_gpu(), "peers_h200": script.peers(),
           "memory_options_8b_4xh200": script.options("memory_options_8b_4xh200")}  # fmt: skip
    for group, rows in now.items():
        told = {row["row"]: row for row in record[group]["rows"]}
        for name, planned, measured, same in rows:
            assert told[name]["planned_ms"] == pytest.approx(planned, abs=0.006), (group, name)
            assert told[name]["measured_ms"] == pytest.approx(measured, abs=0.006)
            assert same is not False, (group, name)


@pytest.fixture
def beside_peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("sections.beside_peers")


def _beside(*runs: dict[str, Any]) -> dict[str, Any]:
    both, peer = {"allocated_gib": 60.0}, {"peer_mode": "stock", "peer_tok_s_gpu": {"stock": 100}}
    return {"rows": [
        {"case": case, "peer_runs": [both], "our_runs": [both | run], **peer, "tok_s_gpu": 110, "ratio": 1.1,
         "planned_over_measured": 0.99, "planned_gib": 60.0}
        for case, run in zip(("A2", "tp2", "pp2"), runs, strict=True)
    ]}  # fmt: skip


def test_waits_are_shown_where_a_record_has_them(beside_peers: Any) -> None:
    none: dict[str, float] = {"measured_ms": 0.04, "planned_ms": 0.0, "planned_slower_ms": 0.0, "idle_ms": 0.0}
    data: dict[str, float] = {"measured_ms": 5.46, "planned_ms": 5.49, "planned_slower_ms": 11.81, "idle_ms": 0.2}
    one = {"profile": {"idle": 0.0021, "exposed": {"data": data, "update": none}, "ranks": [{}, {}]}}
    found = _beside(one, {}, {"not_profiled": "rank 1: ValueError: no trace"})
    head, _, *rows = beside_peers.beside_table(found).splitlines()
    assert head.endswith("| torchtitan, GiB | ours, idle |")
    assert [row.split(" | ")[-1] for row in rows] == ["0.2 % |", " |", " |"]
    about, table = beside_peers.waits_by_axis(found)
    assert about.replace("\n", " ").endswith('16 micro-batches" is not profiled: rank 1: ValueError: no trace.')
    assert table.splitlines()[2:] == [f"| {beside_peers.BESIDE['A2']} | data | 5.5 | 5.5 | 0.2 | 11.8 |"]


def test_a_record_without_them_is_shown_as_before(beside_peers: Any) -> None:
    found = _beside({}, {}, {})
    assert beside_peers.waits_by_axis(found) == ()
    assert beside_peers.beside_table(found).splitlines()[0].endswith("| torchtitan, GiB |")
