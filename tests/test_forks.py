"""What a script starts by `subprocess.run` is forked, and honours what it is called with or refuses it."""

from __future__ import annotations

import os
from pathlib import Path

import forks

SCRIPT = """
import os, subprocess, sys, time
import penteract.cli

def main(words):
    print(os.environ.get("GIVEN"), os.getcwd(), *words, flush=True)
    time.sleep(60 if words == ["wait"] else 0)
    return 3

penteract.cli.main = main
command, captured = [sys.executable, "-m", "penteract"], {"capture_output": True, "text": True}
os.environ["GIVEN"] = "mine"
for how in ({}, {"env": {"GIVEN": "theirs"}}, {"cwd": "/"}):
    done = subprocess.run([*command, "plan"], check=False, **captured, **how)
    print(done.returncode, done.stdout, end="")
for word, how in (
    ("plan", captured | {"check": True}), ("wait", captured | {"timeout": 0.5}),
    ("plan", captured | {"input": "text"}), ("plan", {}), ("plan", {"capture_output": True}),
):
    try:
        print(subprocess.run([*command, word], **how))
    except Exception as error:
        print(type(error).__name__)
print(subprocess.run(["echo", "another"], text=True, stdout=subprocess.PIPE).stdout, end="")
"""


def test_a_command_that_is_forked_has_the_arguments_of_its_call(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done, _ = forks.script(tmp_path / "script.py", os.environ, limit=60)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"3 mine {os.getcwd()} plan", f"3 theirs {os.getcwd()} plan", "3 mine / plan",
        "CalledProcessError", "TimeoutExpired", "TypeError", "TypeError", "TypeError",
        "another",
    ]  # fmt: skip
