"""The process that compiles ahead forks for each kernel: its children compile beside each other, and whatever happens
to one is noted."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

import pytest

import forks

FORKS = """
import json, os, signal, sys, time
from pathlib import Path
from penteract.engine.session.ahead.without_gpu import Compiling

def make(most=8):
    return Compiling(Path("rows"), most)

def rows():
    return [json.loads(line) for line in Path("rows").read_text().splitlines()]

def job(c, name, work, key=None):
    if c.child(name, key or name):
        work()
        c.end("cache")
"""


def forked(code: str, at: Path) -> str:
    """What a process prints whose children do as `code` says."""
    done = forks.code(FORKS + code, folder=at, limit=60)
    return done.stdout + done.stderr


def test_children_compile_beside_each_other(tmp_path: Path) -> None:
    """Six wait for each other, which they could not one after another; of those that may be one at a time, none meets
    another."""
    code = """
def meets():
    Path(f"came-{os.getpid()}").touch()
    while len(list(Path().glob("came-*"))) < 6:
        time.sleep(0.01)

c = make()
for i in range(6):
    job(c, f"job {i}", meets)
    job(c, f"again {i}", meets, f"job {i}")
c.wait()
print(sorted(row["name"] for row in rows()) == [f"job {i}" for i in range(6)], not any(row["error"] for row in rows()))
Path("rows").unlink()

def alone():
    Path("one").mkdir()
    time.sleep(0.2)
    Path("one").rmdir()

c = make(1)
for i in range(3):
    job(c, f"job {i}", alone)
c.wait()
print(len(rows()) == 3 and not any(row["error"] for row in rows()))
"""
    assert forked(code, tmp_path).split() == ["True"] * 3


def test_a_child_that_dies_is_noted(tmp_path: Path) -> None:
    code = """
c = make()
job(c, "dies", lambda: os.kill(os.getpid(), signal.SIGSEGV))
job(c, "lives", lambda: None)
c.wait()
print(sorted((row["name"], row["error"]) for row in rows()))
"""
    assert forked(code, tmp_path) == f"{[('dies', 'its process ended with status 11'), ('lives', '')]}\n"


def test_children_that_hang_end_with_their_parent(tmp_path: Path) -> None:
    code = """
signal.alarm(1)
c = make()
lock = open("lock", "w")
import fcntl; fcntl.flock(lock, fcntl.LOCK_EX)
job(c, "hangs", lambda: time.sleep(600))
c.wait()
"""
    began = time.monotonic()
    forked(code, tmp_path)
    with (tmp_path / "lock").open() as lock:
        for _ in range(100):
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.05)
        else:
            pytest.fail("a child still has the lock")
    assert time.monotonic() - began < 40
