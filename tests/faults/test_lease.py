"""Two processes and one run: one of them trains, whatever the other believes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from penteract.engine.run_folder import lease
from penteract.engine.run_folder.exclusive import create_exclusively
from penteract.engine.run_folder.lease import Holder, Lease, take
from penteract.errors import BadInput
from sent_again import links_twice

HOLDS = """
import sys, time
from pathlib import Path
from penteract.engine.run_folder import lease
taken = lease.take(Path(sys.argv[1])).begin()
print(taken.epoch, flush=True)
time.sleep(60)
"""


def holding(folder: Path) -> subprocess.Popen[str]:
    """A process that has the run."""
    words = [sys.executable, "-c", HOLDS, str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": src()})
    assert process.stdout is not None and process.stdout.readline() == "1\n"
    return process


def src() -> str:
    return str(Path(lease.__file__).parents[3])


def elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on this process is on another host than those that took epochs so far."""
    monkeypatch.setattr(lease, "_boot", lambda: "another")


def test_a_run_has_one_holder_at_a_time(tmp_path: Path) -> None:
    process = holding(tmp_path)
    try:
        with pytest.raises(BadInput, match=f"process {process.pid} on ") as refused:
            take(tmp_path)
        assert refused.value.exit_code == 2
    finally:
        process.kill()
        process.wait()
    assert take(tmp_path).epoch == 2  # it is dead, as everybody here can see


def test_a_holder_that_has_ended_is_none(tmp_path: Path) -> None:
    first = take(tmp_path)
    with pytest.raises(BadInput, match=f"process {os.getpid()} on "):
        take(tmp_path)
    first.end()
    assert take(tmp_path).epoch == 2


def test_a_number_that_another_process_has_now_is_not_the_holder(tmp_path: Path) -> None:
    take(tmp_path)
    path = tmp_path / "epochs" / "000001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "started": "1"}))
    assert take(tmp_path).epoch == 2


def test_elsewhere_its_beats_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    first, said = take(tmp_path).begin(), list[str]()
    elsewhere(tmp_path, monkeypatch)
    with pytest.raises(BadInput, match="another process trains this run"):
        take(tmp_path, notify=said.append, patience=5)
    assert len(said) == 1 and "waiting up to 5 s" in said[0]
    first._over.set()  # it stopped without a word
    time.sleep(0.2)
    start = time.monotonic()
    assert take(tmp_path, patience=0.5).epoch == 2
    assert time.monotonic() - start >= 0.5


def test_one_that_was_taken_for_dead_learns_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    first, learnt = take(tmp_path), threading.Event()
    first.ousted = learnt.set
    elsewhere(tmp_path, monkeypatch)
    assert take(tmp_path, patience=0.3).epoch == 2
    first.begin()  # it was suspended, and goes on
    assert learnt.wait(5)


def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    for epoch in range(1, 6):
        got, refused, gate = list[Lease](), list[BadInput](), threading.Barrier(8)

        def ask(got: list[Lease] = got, refused: list[BadInput] = refused, gate: threading.Barrier = gate) -> None:
            gate.wait()
            try:
                got.append(take(tmp_path))
            except BadInput as e:
                refused.append(e)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [one.epoch for one in got] == [epoch] and len(refused) == 7
        got[0].end()
    assert {p.suffix for p in (tmp_path / "epochs").iterdir()} == {".json", ".ended"}


def test_a_link_that_was_made_and_whose_answer_was_lost_is_this_process_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS sends a request again that nobody has answered; it then finds the name that the first has made."""
    monkeypatch.setattr(os, "link", links_twice)
    first = take(tmp_path)
    assert first.epoch == 1
    assert [path.name for path in (tmp_path / "epochs").iterdir()] == ["000001.json"]
    with pytest.raises(BadInput, match=f"process {os.getpid()} on "):
        take(tmp_path)
    first.end()
    assert take(tmp_path).epoch == 2


@pytest.mark.parametrize("other", ["a file", "a name of another"])
def test_a_file_of_another_process_is_not_this_ones(tmp_path: Path, other: str) -> None:
    theirs, path = tmp_path / "theirs", tmp_path / "path"
    theirs.write_text("theirs")
    if other == "a file":
        theirs.rename(path)
    else:
        os.link(theirs, path)
    with pytest.raises(FileExistsError):
        create_exclusively(path, "ours")
    assert path.read_text() == "theirs" and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "null"])
def test_a_holder_that_cannot_be_read_is_waited_for(tmp_path: Path, text: str) -> None:
    take(tmp_path)
    (tmp_path / "epochs" / "000001.json").write_text(text)
    assert take(tmp_path, patience=0.2).epoch == 2


def test_a_stopped_process_is_alive_and_a_zombie_is_not(tmp_path: Path) -> None:
    process = holding(tmp_path)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(BadInput):
        take(tmp_path)
    process.kill()
    while lease._started(process.pid):  # until the kernel has ended it; nobody has waited for it yet
        time.sleep(0.01)
    assert take(tmp_path).epoch == 2
    process.wait()


def test_the_boot_and_the_namespace_count() -> None:
    here = Holder.here()
    assert here.visible and here.alive
    assert not replace(here, boot="other").visible
    assert not replace(here, namespace="pid:[1]").visible
    assert not replace(here, started="7").alive
