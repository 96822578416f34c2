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
from penteract.measure.calibrate.links.measure_links import LinkRows

Tell = Callable[..., Any]


def test_it_writes_the_file_and_says_what_is_left(tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def calibrate(out: Path, budget: float, said: Any, links: Any) -> measuring.Calibrated:
        assert 0 < budget <= 5 and links == [("link", "all_gather", 2, 64)]
        said(measuring.CalibrationState(10, 40, ("copy", 64), 3.0, 9.0))
        return measuring.Calibrated("[node]\n", 30, 2, 10)

    monkeypatch.setattr(measuring, "calibrate", calibrate)
    monkeypatch.setattr(LinkRows, "of", lambda path, ranks, world: Links(path, ranks))
    out = tmp_path / "here.toml"
    said = tell("calibrate", "--out", str(out), "--budget", "5")
    assert said.code == 0 and out.read_text() == "[node]\n"
    assert "30 workloads, 2 of which this device cannot run; 10 are left" in said.out
    assert "10/40 · copy 64 · 3 s, about 9 s left" in said.err
    assert "it exists already" in tell("calibrate", "--out", str(out)).err
    out.with_suffix(".rows.jsonl").write_text("")
    monkeypatch.setattr(Links, "code", 72)
    assert tell("calibrate", "--out", str(out), "--budget", "5", "--ranks", "2").code == 72


class Links:
    """Stands in for the ranks."""

    keys = (("link", "all_gather", 2, 64),)
    code = 0

    def __init__(self, path: Path, ranks: int | None) -> None:
        assert path.name == "here.rows.jsonl" and ranks in (None, 2)
        self.keys = [*self.keys]

    def measure(self, seconds: float, say: Callable[[str], None]) -> int:
        assert seconds == pytest.approx(2.0)
        return self.code


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--out", "a.json"), "a hardware file is TOML"),
        (("--out", "a.toml", "--budget", "0"), "not a budget"),
        (("--out", "a.toml", "--budget", "nan"), "not a budget"),
        (("--out", "a.toml", "--ranks", "0"), "not a number of devices here"),
        (("--out", "nowhere/a.toml"), "cannot be written"),
        (("--check", "nowhere.toml"), "No such file"),
        (("--check", "here"), "this machine was not measured"),
        (("--check", "8xH200"), "*.toml, or here"),
        (("--check", "a.toml", "--out", "b.toml"), "a check writes no file"),
        (("--check", "a.toml", "--ranks", "2"), "a check looks at all devices"),
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
    monkeypatch.setattr(measuring, "calibrate", lambda out, budget, said, links: measuring.Calibrated("x", 1, 0, 0))
    said = tell("calibrate", "--ranks", "1")
    assert said.code == 0 and "one device: there is no link to measure" in said.err
    assert machine_file().read_text() == "x" and tmp_path in machine_file().parents


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
    pairs = {(0, 1, 3 * 10**6): 10.0, (1, 0, 3 * 10**6): 10.5}
    monkeypatch.setattr(checking, "check_links", lambda file: checking.judged(pairs, pairs))
    monkeypatch.setattr(verb, "cluster", lambda text: None)
    said = tell("calibrate", "--check", "mine.toml")
    assert said.code == 1
    assert "cuda:0 H200: as its file" in said.out and "cuda:1 H200: slower than its file, 1.20 times" in said.out
    assert "links: as their file, 286 to 300 GB/s" in said.out
    monkeypatch.setattr(checking, "check_devices", lambda file, budget: found[:1])
    assert tell("calibrate", "--check", "mine.toml").code == 0
    monkeypatch.setattr(checking, "check_links", lambda file: checking.judged(pairs, {(0, 1, 3 * 10**6): 5.0}))
    said = tell("calibrate", "--check", "mine.toml")
    assert said.code == 1 and "link 0 to 1: 300 GB/s, slower than its file, 2.00 times its time" in said.out
    assert "link 1" not in said.out


def test_a_rank_that_fails_ends_a_check(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(file: Path) -> None:
        raise checking.LinksFailed(72)

    monkeypatch.setattr(checking, "check_devices", lambda file, budget: [])
    monkeypatch.setattr(checking, "check_links", fails)
    monkeypatch.setattr(verb, "cluster", lambda text: None)
    assert tell("calibrate", "--check", "mine.toml").code == 72
