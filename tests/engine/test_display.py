from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from penteract.engine.session.outputs.display import LINES, ROWS, LiveTable

LAYOUT = "dp 2 · tp 2"


def row(step: int, more: dict[str, float] | None = None) -> dict[str, object]:
    return {"step": step, "train/loss": 5.5 - step / 10, "train/lr": 1e-3, "perf/tokens_per_sec": 12345.6,
            "perf/step_time_s": 0.5, "mem/predicted_gib": 1.5, "mem/measured_gib": 0.25,
            **(more or {})}  # fmt: skip


LAST = "loss 5.400 -> 2.346 in 61.2 s of training · runs/one"


def console_of(*, terminal: bool = False, width: int = 120, environment: dict[str, str] | None = None) -> Console:
    return Console(file=StringIO(), width=width, force_terminal=terminal, legacy_windows=False,
                   _environ={"TERM": "xterm-256color"} | (environment or {}))  # fmt: skip


def text_of(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def run(steps: int, console: Console, *, quiet: bool = False) -> str:
    with LiveTable(steps, LAYOUT, quiet=quiet, console=console) as table:
        for step in range(1, steps + 1):
            table.step(row(step))
        table.finish(5.4, 2.34567, 61.25, Path("runs/one"))
    return text_of(console)


def test_lines_where_there_is_no_terminal() -> None:
    rest = "learning rate 1.00e-03  12.3k tokens/s  memory 1.50 GiB predicted, 256.00 MiB measured"
    assert run(3, console_of()).splitlines() == [
        LAYOUT,
        f"step 1/3  loss 5.400  {rest}  1.0 s left",
        f"step 2/3  loss 5.300  {rest}  0.5 s left",
        f"step 3/3  loss 5.200  {rest}  0.0 s left",
        LAST,
    ]


def test_a_long_run_says_a_twentieth_at_a_time() -> None:
    lines = run(1000, console_of()).splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines[1:-1]] == [1, *range(50, 1001, 50)]
    assert len(lines) == 1 + 1 + LINES + 1


def test_a_narrow_pipe_folds_nothing() -> None:
    assert run(3, console_of(width=20)) == run(3, console_of())


def test_what_is_unknown_is_not_made_up() -> None:
    console = console_of()
    LiveTable(10, "", console=console).step({"step": 10, "train/loss": None})
    assert text_of(console) == (
        "step 10/10  loss -  learning rate -  - tokens/s  memory - predicted, - measured  - left\n"
    )


def test_validation_stands_beside_the_loss() -> None:
    console = console_of()
    LiveTable(1, LAYOUT, console=console).step(row(1, {"val/loss": 6.0}))
    assert "loss 5.400 (validation 6.000)" in text_of(console)


def test_time_left_is_the_median_of_the_recent_steps() -> None:
    console = console_of()
    table = LiveTable(23, LAYOUT, console=console)
    for step, seconds in enumerate([60.0, *[2.0] * 20, 60.0], 1):
        table.step(row(step, {"perf/step_time_s": seconds}))
    assert text_of(console).splitlines()[-1].endswith("2.0 s left")


def test_a_table_on_a_terminal_of_80_columns() -> None:
    console = console_of(terminal=True, width=80, environment={"NO_COLOR": "1"})
    found = run(ROWS + 3, console)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", found[found.rindex(LAYOUT) :]).splitlines()
    assert last[0].strip() == "dp 2 · tp 2 · 15 steps"
    assert last[2].split() == [
        "step",
        "loss",
        "val",
        "loss",
        "rate",
        "tokens/s",
        "predicted",
        "measured",
        "time",
        "left",
    ]
    rows = [line.split() for line in last[4:-1]]
    assert [int(r[0]) for r in rows] == list(range(4, ROWS + 4))
    assert rows[-1][1:] == ["4.000", "1.00e-03", "12.3k", "1.50", "GiB", "256.00", "MiB", "0.0", "s"]
    assert last[-1] == LAST
    assert not re.search(r"\x1b\[[0-9;]*3[0-9][;m]", found)


def test_the_last_line_is_exact_on_a_terminal_too() -> None:
    assert run(1, console_of(terminal=True)).endswith(
        "\n\x1b[?25hloss 5.400 -> 2.346 in 61.2 s of training · runs/one\n"
    )


def test_quiet_says_the_last_line_alone() -> None:
    for terminal in (False, True):
        assert (
            run(3, console_of(terminal=terminal), quiet=True)
            == "loss 5.400 -> 2.346 in 61.2 s of training · runs/one\n"
        )


def test_json_leaves_standard_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for machine in (True, False):
        with LiveTable(1, LAYOUT, json=machine) as table:
            table.step(row(1))
            table.finish(1, 1, 1, Path("runs/one"))
        found = capsys.readouterr()
        silent, spoken = (found.out, found.err) if machine else (found.err, found.out)
        assert silent == "" and spoken.endswith("loss 1.000 -> 1.000 in 1.0 s of training · runs/one\n")


def test_an_error_leaves_the_terminal_in_order() -> None:
    console = console_of(terminal=True)
    with pytest.raises(KeyboardInterrupt), LiveTable(5, LAYOUT, console=console) as table:
        table.step(row(1))
        raise KeyboardInterrupt
    found = text_of(console)
    assert found.count("\x1b[?25l") == found.count("\x1b[?25h") == 1  # the cursor is hidden, then shown again
