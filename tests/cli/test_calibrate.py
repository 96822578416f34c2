"""`penteract calibrate` as it is typed, up to measuring."""

from __future__ import annotations

import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penteract.cli import calibrate as verb
from penteract.config.files.machine_file import machine_file
from penteract.measure.calibrate import checking, measuring

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
        (("--check", "nowhere.toml"), "No such file"),
        (("--check", "here"), "this machine was not measured"),
        (("--check", "8xH200"), "*.toml, or here"),
        (("--check", "a.toml", "--out", "b.toml"), "a check writes no file"),
    ],
)
def test_what_cannot_be_is_refused(
    tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = tell("calibrate", *words)
    assert said.code == 2 and line in said.err and not list(tmp_path.iterdir())


def test_without_a_file_it_is_the_machines_own(tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "calibrate", lambda out, budget, said: measuring.Calibrated(f"{budget}", 1, 0, 0))
    assert tell("calibrate").code == 0
    assert machine_file().read_text() == "480.0" and tmp_path in machine_file().parents


def test_a_cache_folder_that_cannot_be_made_is_refused(
    tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said = tell("calibrate")
    assert said.code == 2 and "cannot be made: Not a directory" in said.err and "--out FILE.toml" in said.err


@pytest.mark.parametrize("words", [("calibrate",), ("plan", "tiny", "--gpus", "here")])
def test_a_user_without_a_home_is_told(tell: Tell, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    def nobody(user: int) -> None:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    said = tell(*words)
    assert said.code == 2 and "set XDG_CACHE_HOME" in said.err


def test_a_check_says_which_device_is_slow(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        checking.DeviceCheck("cuda:0 H200", {("copy", 1): 1.0}),
        checking.DeviceCheck("cuda:1 H200", {("copy", 1): 1.2}),
    ]
    monkeypatch.setattr(checking, "check_devices", lambda file, budget: found)
    monkeypatch.setattr(checking, "check_links", lambda: checking.judged({(0, 1): 300.0, (1, 0): 290.0}))
    monkeypatch.setattr(verb, "cluster", lambda text: None)
    said = tell("calibrate", "--check", "mine.toml")
    assert said.code == 1
    assert "cuda:0 H200: as its file" in said.out and "cuda:1 H200: slower than its file, 1.20 times" in said.out
    assert "links: 290 to 300 GB/s" in said.out
    monkeypatch.setattr(checking, "check_devices", lambda file, budget: found[:1])
    assert tell("calibrate", "--check", "mine.toml").code == 0
