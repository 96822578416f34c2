"""Ranks that start before they know what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penteract.engine.runtime import prepared
from penteract.engine.runtime.launch import launch
from penteract.engine.runtime.prepared import WORKER, PreparedRanks

STAND_IN = """
import os, sys
from penteract.engine.runtime.prepared import ORDERS, orders

assert sys.argv[1].startswith(ORDERS)
words = orders(sys.argv[1])
print("rank", os.environ["RANK"], *words[:2], flush=True)
if os.environ["RANK"] == "0" and "--listen" in words:
    import socket
    number = int(words[-1].removeprefix("--store-fd="))
    assert socket.socket(fileno=number).getsockname()[1] == int(os.environ["MASTER_PORT"])
sys.exit(int(words[0]))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A rank that does nothing but say its orders, in place of one that trains."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(prepared, "WORKER", "stand_in")
    monkeypatch.setattr(prepared, "usable_here", lambda: 4)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    yield tmp_path


def made(world: int) -> PreparedRanks:
    found = PreparedRanks.of(world, os.environ)
    assert found is not None
    return found


def test_they_do_what_they_are_told_and_print_where_ranks_print(
    stand_in: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = made(2)
    pids = [p.pid for p in ranks.processes]
    assert launch(2, ["-m", "stand_in", "0", "--listen"], stand_in, os.environ, prepared=ranks) == 0
    assert capfd.readouterr().out == "rank 0 0 --listen\n"
    assert (stand_in / "logs" / "rank-00001.log").read_text() == "rank 1 0 --listen\n"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert ranks.store.fileno() == -1


def test_the_exit_code_of_one_is_the_launchers(stand_in: Path) -> None:
    assert launch(1, ["-m", "stand_in", "7"], stand_in, os.environ, prepared=made(1)) == 7


def test_those_of_another_run_end_and_others_start(stand_in: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A rank more, another environment, another module, and one that has ended."""
    script = ["-c", "import os; print('new', os.environ['RANK'])"]
    for ranks, environment in ((made(2), os.environ), (made(1), {**os.environ, "A": "b"}), (made(1), os.environ)):
        processes = list(ranks.processes)
        assert launch(1, script, stand_in, environment, prepared=ranks) == 0
        assert capfd.readouterr().out == "new 0\n"
        assert all(p.poll() is not None for p in processes)
    ranks = made(1)
    ranks.processes[0].kill()
    ranks.processes[0].wait()
    assert not ranks.fits(1, ["-m", "stand_in"], os.environ)
    with ranks:
        pass


def test_what_a_rank_said_before_its_orders_is_in_its_log(stand_in: Path) -> None:
    """Of one that goes on, and of one that ends before it reads them."""
    script = stand_in / "stand_in.py"
    said = "import os, sys, time\nprint('early', file=sys.stderr, flush=True)\n"
    script.write_text(said + STAND_IN)
    ranks = made(2)
    assert launch(2, ["-m", "stand_in", "0"], stand_in, os.environ, prepared=ranks) == 0
    log = stand_in / "logs" / "rank-00001.log"
    assert log.read_text() == "early\nrank 1 0\n"
    log.unlink()
    script.write_text(
        said + "time.sleep(1)\nif os.environ['RANK'] == '1':\n    raise ImportError('broken')\n" + STAND_IN
    )
    ranks = made(2)
    assert launch(2, ["-m", "stand_in", "0"], stand_in, os.environ, prepared=ranks) == 70
    assert "early\n" in log.read_text() and "ImportError: broken" in log.read_text()


def test_a_log_that_cannot_be_written_is_an_error_of_the_launcher(stand_in: Path) -> None:
    (stand_in / "logs" / "rank-00001.log").mkdir(parents=True)
    ranks = made(2)
    processes = list(ranks.processes)
    with pytest.raises(IsADirectoryError):
        launch(2, ["-m", "stand_in", "0"], stand_in, os.environ, prepared=ranks)
    assert all(p.poll() is not None for p in processes)


def test_there_are_none_of_more_ranks_than_cores_or_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "usable_here", lambda: 4)
    assert PreparedRanks.of(5, os.environ) is None
    monkeypatch.setattr(prepared, "find_spec", lambda name: None)
    assert PreparedRanks.of(1, os.environ) is None


def test_a_command_that_is_refused_leaves_none(tmp_path: Path) -> None:
    words = ["train", "--preset=tiny", "--data.source=absent.txt", f"--output.folder={tmp_path}"]
    marked = {**os.environ, "OF_THIS_TEST": str(tmp_path)}
    command = [sys.executable, "-m", "penteract", *words]
    done = subprocess.run(command, env=marked, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.count("error[FILE]") == 1 and done.stdout == ""
    assert not [file for file in Path("/proc").glob("[0-9]*/environ") if _has(file, str(tmp_path))]


def _has(file: Path, word: str) -> bool:
    try:
        return word in file.read_text()
    except OSError:  # it has ended, or is another user's
        return False


def test_the_worker_waits_for_its_orders(tmp_path: Path) -> None:
    """The real one, which imports torch meanwhile: told of a folder that is none, it says so and ends with 2."""
    ranks = made(1)
    assert ranks.fits(1, ["-m", WORKER, "folder"], os.environ)
    code = launch(1, ["-m", WORKER, str(tmp_path / "none")], tmp_path, os.environ, prepared=ranks)
    assert code == 2
