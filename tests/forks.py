"""Processes that have torch from their first moment: forked from one that has loaded it and does nothing else.

Loading torch takes a process longer than most tests.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, TypeVar

LOADED = (
    "torch.distributed",
    "torch._dynamo",  # a rehearsal loads it: a second and a half of each rank
    "penteract.cli.app",
    "penteract.cli.train",
    "penteract.cli.resolve.planned_run",  # which that imports when it runs
    "penteract.engine.runtime.start",
    "penteract.engine.runtime.worker",
    "penteract.engine.checkpoint.writing",
    "pytest",
    "hypothesis",
    "frozen",
)

Answer = TypeVar("Answer")

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([*LOADED])


_READY, _ONE = threading.Event(), threading.Lock()


def ready() -> None:
    """Start the process that all are forked from, once, whichever thread asks first: it finds `frozen` by its
    environment."""
    with _ONE:
        if _READY.is_set():
            return
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), before)))
        try:
            forkserver.ensure_running()
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
        _READY.set()


def start(
    work: Callable[..., int], *arguments: Any, environment: Mapping[str, str], out: Path, err: Path
) -> multiprocessing.Process:
    """`work(*arguments)` in a process of its own, which ends with what it returns; what it says goes to two files."""
    ready()
    process = context.Process(target=_main, args=(work, arguments, dict(environment), out, err))
    process.start()
    return process  # type: ignore[return-value]


def penteract(
    words: Sequence[str], environment: Mapping[str, str], *, folder: Path | None = None, limit: float = 240
) -> subprocess.CompletedProcess[str]:
    """`penteract WORDS` to its end, and so the ranks that it starts: what `subprocess.run` would give."""
    with begun(words, environment, folder=folder) as command:
        return command.result(limit)


def answer(work: Callable[..., Answer], *arguments: Any, limit: float = 240) -> Answer:
    """What `work(*arguments)` gives in a process of its own, and so the ranks that it launches."""
    with TemporaryDirectory() as said:
        out, err, file = (Path(said) / name for name in ("out", "err", "answer"))
        process = start(_answer, work, arguments, file, environment=os.environ, out=out, err=err)
        try:
            process.join(limit)
        finally:
            process.kill()
            process.join()
        assert process.exitcode == 0, err.read_text()
        return pickle.loads(file.read_bytes())


def code(source: str, *, folder: Path, limit: float) -> subprocess.CompletedProcess[str]:
    """`python -c SOURCE` in `folder` to its end, but that it has torch already: what `subprocess.run` would give."""
    with TemporaryDirectory() as said:
        out, err = Path(said) / "out", Path(said) / "err"
        process = start(_code, source, folder, environment=os.environ, out=out, err=err)
        try:
            return Command(["-c", source], process, out, err).result(limit)
        finally:
            process.kill()
            process.join()


def script(
    path: Path, environment: Mapping[str, str], *, limit: float
) -> tuple[subprocess.CompletedProcess[str], float]:  # fmt: skip
    """`python PATH` to its end, and what it took of cores, in seconds. The commands that it starts are forked from it,
    but for `train`: that one is a new interpreter, as it is for people."""
    with TemporaryDirectory() as said:
        out, err, file = (Path(said) / name for name in ("out", "err", "seconds"))
        process = start(_script, path, file, environment=environment, out=out, err=err)
        try:
            done = Command([str(path)], process, out, err).result(limit)
        finally:
            process.kill()
            process.join()
        return done, float(file.read_text()) if file.exists() else 0.0


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ranks(
    words: Sequence[Sequence[str]], environment: Mapping[str, str], *, world: int | None = None,
    folder: Path | None = None,
) -> list[subprocess.CompletedProcess[str]]:  # fmt: skip
    """`penteract WORDS[r]` as rank r, at once, to their ends: as a launcher of `world` ranks would start them."""
    port = free_port()
    place = {"WORLD_SIZE": world or len(words), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with ExitStack() as stack:
        started: list[Command] = []
        for number, own in enumerate(words):
            told = place | {"RANK": number, "LOCAL_RANK": number}
            more = {name: str(value) for name, value in told.items()}
            started.append(stack.enter_context(begun(own, dict(environment) | more, folder=folder)))
        return [command.result() for command in started]


@dataclass(slots=True)
class Command:
    """`penteract WORDS` as it runs, and what it has printed so far."""

    words: list[str]
    process: multiprocessing.process.BaseProcess
    out: Path
    err: Path

    def result(self, limit: float | None = 240) -> subprocess.CompletedProcess[str]:
        """Its exit code and output, once it has ended."""
        self.process.join(limit)
        if self.process.is_alive():
            raise subprocess.TimeoutExpired(self.words, limit or 0, self.out.read_text(), self.err.read_text())
        assert self.process.exitcode is not None
        return subprocess.CompletedProcess(
            self.words, self.process.exitcode, self.out.read_text(), self.err.read_text()
        )  # fmt: skip


@contextmanager
def begun(
    words: Sequence[str], environment: Mapping[str, str], *, folder: Path | None = None
) -> Iterator[Command]:  # fmt: skip
    """`penteract WORDS` under way; it is killed at the end of the context."""
    with TemporaryDirectory() as said:
        out, err = Path(said) / "out", Path(said) / "err"
        process = start(_command, [*words], folder, environment=environment, out=out, err=err)
        try:
            yield Command([*words], process, out, err)
        finally:
            process.kill()
            process.join()


def _main(work: Callable[..., int], arguments: Any, environment: dict[str, str], out: Path, err: Path) -> None:
    with out.open("wb") as o, err.open("wb") as e:
        _become(environment, o.fileno(), e.fileno())
        sys.exit(work(*arguments))


def _become(environment: Mapping[str, str], out: int | None, err: int | None) -> None:
    """What a new interpreter would have made of all this when it started."""
    os.environ.clear()
    os.environ.update(environment)
    for fd, to in ((out, 1), (err, 2)):
        if fd is not None:
            os.dup2(fd, to)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    if (threads := environment.get("OMP_NUM_THREADS")) is not None:
        import_module("torch").set_num_threads(int(threads))


def _command(words: list[str], folder: Path | None) -> int:
    from penteract.cli import main

    if folder is not None:
        os.chdir(folder)
        sys.path.insert(0, str(folder))  # as `python -m` does
    _fork_ranks()
    return main(words)


def _code(source: str, folder: Path) -> int:
    os.chdir(folder)
    exec(source, {"__name__": "__main__"})
    return 0


def _answer(work: Callable[..., Any], arguments: Any, file: Path) -> int:
    _fork_ranks()
    file.write_bytes(pickle.dumps(work(*arguments)))
    return 0


def _script(path: Path, file: Path) -> int:
    subprocess.run = _forked  # type: ignore[assignment]
    run_path(str(path), run_name="__main__")
    file.write_text(str(sum(os.times()[:4])))
    return 0


def _forked(words: list[str], *, run: Any = subprocess.run, **how: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run`, but that commands which `penteract.api` starts are forked, all but `train`."""
    if words[:3] != [sys.executable, "-m", "penteract"] or words[3] == "train":
        return run(words, **how)
    return _run_forked(words, **how)


def _run_forked(
    words: list[str], *, capture_output: bool = False, text: bool = False, check: bool = False,
    env: Mapping[str, str] | None = None, cwd: str | Path | None = None, timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """A command to its end, as `subprocess.run` would give it. What else that takes is a TypeError here."""
    if not (capture_output and text):
        raise TypeError("output of a command that is forked is text, and is captured")
    with TemporaryDirectory() as said:
        out, err = Path(said) / "out", Path(said) / "err"
        folder, environment = None if cwd is None else Path(cwd), dict(os.environ if env is None else env)
        about = (_command, (words[3:], folder), environment, out, err)
        process = multiprocessing.get_context("fork").Process(target=_main, args=about)
        process.start()
        try:
            done = Command(words, process, out, err).result(timeout)
        finally:
            process.kill()
            process.join()
    if check:
        done.check_returncode()
    return done


def _fork_ranks() -> None:
    """Ranks that this process launches are forked from it."""
    from penteract.engine.runtime import rank_environment

    rank_environment.subprocess = SimpleNamespace(Popen=Rank, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]


class Rank:
    """`python -m MODULE WORDS` as the launcher asks for it, forked from the launcher: its `main` is called."""

    def __init__(  # noqa: PLR0913 (those of Popen)
        self, command: list[str], *, env: Mapping[str, str], stdout: Any, stderr: Any, stdin: int, process_group: int,
        preexec_fn: Callable[[], None], pass_fds: Sequence[int],
    ) -> None:  # fmt: skip
        assert (command[:2], stdin, process_group) == ([sys.executable, "-m"], subprocess.DEVNULL, 0)
        files = [file if file is None else file.fileno() for file in (stdout, stderr)]
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=self._main, args=(command[2:], env, files, preexec_fn))
        self.process.start()

    @staticmethod
    def _main(command: list[str], env: Mapping[str, str], files: list[int | None], first: Callable[[], None]) -> None:
        os.setpgid(0, 0)
        first()
        _become(env, *files)
        sys.exit(import_module(command[0]).main(command[1:]))

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
