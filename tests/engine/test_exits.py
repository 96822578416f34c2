"""The end of a rank's process: after its threads and exit handlers, and before its modules are taken down."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDS = """
import atexit
atexit.register(print, "earlier")
from penteract.engine.runtime.exits import end_before_finalising, ends_with
end_before_finalising()
import sys, threading, time

class Module:
    def __del__(self):
        print("taken down")

def late():
    time.sleep(0.2)
    print("thread")

held = Module()
atexit.register(print, "handler", end="")  # flushed at the end
threading.Thread(target=late).start()
print("worked")
"""


@pytest.mark.parametrize(("last", "code", "printed"), [
    ("sys.exit(ends_with(0))", 0, "worked\nthread\nhandler"),
    ("sys.exit(ends_with(75))", 75, "worked\nthread\nhandler"),
    ("sys.exit(3)", 3, "worked\nthread\nhandlerearlier\ntaken down\n"),  # nobody has said what it ends with
])  # fmt: skip
def test_a_process_ends_after_threads_and_handlers(last: str, code: int, printed: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS + last], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, printed, "")
