"""`penteract calibrate` as it is typed, up to measuring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penteract.measure.calibrate import measuring

Tell = Callable[..., Any]


def test_it_writes_the_file_and_says_what_is_left(tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def calibrate(out: Path, budget: float, said: Any) -> measuring.Calibrated:
        said(measuring.CalibrationState(10, 40, ("copy", 64), 3.0, 9.0))
        return measuring.Calibrated("[node]\n", 30, 2, 10)

    monkeypatch.setattr(measuring, "calibrate", calibrate)
    out = tmp_path / "here.toml"
    said = tell("calibrate", "--out", str(out), "--budget", "5")
    assert said.code == 0 and out.read_text() == "[node]\n"
    assert "30 workloads, 2 of which this device cannot run; 10 are left" in said.out
    assert "10/40 · copy 64 · 3 s, about 9 s left" in said.err
    assert "it exists already" in tell("calibrate", "--out", str(out)).err
    out.with_suffix(".rows.jsonl").write_text("")
    assert tell("calibrate", "--out", str(out)).code == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--out", "a.json"), "a hardware file is TOML"),
        (("--out", "a.toml", "--budget", "0"), "not a budget"),
        (("--out", "a.toml", "--budget", "nan"), "not a budget"),
        (("--out", "nowhere/a.toml"), "cannot be written"),
    ],
)
def test_what_cannot_be_is_refused(
    tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = tell("calibrate", *words)
    assert said.code == 2 and line in said.err and not list(tmp_path.iterdir())
