"""Hosts on one machine: network, UTS, PID and mount namespaces, joined by a bridge. They share the file system."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_PORT = 29_571  # in a network of its own nobody else has it
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def missing() -> str:
    """Why there can be no such hosts here; "" if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces of a network need Linux and root"
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    try:
        with Network(1):
            return ""
    except subprocess.CalledProcessError as e:
        return f"{' '.join(e.cmd)}: {e.stderr.strip()}"


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


class Network:
    """So many hosts, `10.77.0.1` and on. Entered and left once."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self._name = f"penteract{os.getpid()}"

    def __enter__(self) -> Network:
        self._remove()
        try:
            _call("ip", "netns", "add", self._switch)
            _call("ip", "-n", self._switch, "link", "add", "joint", "type", "bridge")
            _call("ip", "-n", self._switch, "link", "set", "joint", "up")
            for i in range(self.hosts):
                self._add(i)
        except subprocess.CalledProcessError:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def link(self, host: int, state: str) -> None:
        """The cable of a host is pulled out ("down"), or put back ("up")."""
        _call("ip", "-n", self._switch, "link", "set", f"port{host}", state)

    def slow(self, host: int, rate: str) -> None:
        """What a host sends leaves at this rate from now on, as "20mbit"."""
        shape = ("tbf", "rate", rate, "burst", "32kbit", "latency", "2s")
        _call("tc", "-n", self._of(host), "qdisc", "replace", "dev", "eth0", "root", *shape)

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line of a process on a host. All that it starts ends with it."""
        become = 'hostname "$0" && exec "$@"'
        own = ["unshare", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", self._of(host), *own, "sh", "-c", become, f"host{host}", *command]

    @property
    def _switch(self) -> str:
        return f"{self._name}s"

    def _of(self, host: int) -> str:
        return f"{self._name}h{host}"

    def _add(self, host: int) -> None:
        own, port = self._of(host), f"port{host}"
        _call("ip", "netns", "add", own)
        _call("ip", "-n", own, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self._switch)
        _call("ip", "-n", self._switch, "link", "set", port, "master", "joint", "up")
        _call("ip", "-n", own, "addr", "add", f"10.77.0.{host + 1}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _call("ip", "-n", own, "link", "set", device, "up")

    def _remove(self) -> None:
        for name in (*(self._of(i) for i in range(self.hosts)), self._switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@dataclass(slots=True)
class Torchrun:
    """`penteract WORDS` by one torchrun on each host, a rank each."""

    network: Network
    words: Sequence[str]
    folder: Path  # of what they print
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def start(self) -> None:
        """Start them all."""
        self.folder.mkdir()
        for host in range(self.network.hosts):
            run = [
                sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.network.hosts}", f"--node-rank={host}",
                "--nproc-per-node=1", "--master-addr=10.77.0.1", f"--master-port={_PORT}", "-m", "penteract",
                *self.words,
            ]  # fmt: skip
            environment = {k: v for k, v in os.environ.items() if k not in _PLACE}
            environment |= {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            with (self.folder / str(host)).open("wb") as out:
                self.processes.append(
                    subprocess.Popen(
                        self.network.inside(host, run),
                        stdout=out,
                        stderr=out,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )

    def ended(self, seconds: float) -> list[int]:
        """Their exit codes, once all have ended."""
        return [process.wait(seconds) for process in self.processes]

    def said(self, host: int) -> str:
        """What a host has printed."""
        return (self.folder / str(host)).read_text(errors="replace")

    @property
    def complaints(self) -> list[str]:
        """The errors that each host has printed; else the end of what it has."""
        texts = [self.said(host) for host in range(self.network.hosts)]
        return ["\n".join(line for line in text.splitlines() if "error[" in line) or text[-800:] for text in texts]

    def kill(self, host: int) -> None:
        """A host is gone: all its processes, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.processes[host].pid, signal.SIGKILL)
        self.processes[host].wait()


@contextmanager
def torchrun(network: Network, words: Sequence[str], folder: Path) -> Iterator[Torchrun]:
    """A run of all hosts under way; it is killed at the end of the context."""
    run = Torchrun(network, words, folder)
    run.start()
    try:
        yield run
    finally:
        for host in range(network.hosts):
            run.kill(host)


def status(run: Path) -> dict[str, object]:
    """What a run says of its end."""
    return dict(json.loads((run / "status.json").read_text()))
