"""The store of the ranks: who reaches it can end a run, so it listens where ranks are and nowhere else."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import forks
from penteract.engine.rank.store import _listen, open_store
from penteract.errors import PeerLost

# A port that was free a moment ago: another test could take it.
at_a_free_port = pytest.mark.alone

LISTENING = "0A"  # in /proc/net/tcp


def listens_at(pids: list[int]) -> set[str]:
    """Addresses at which these processes listen, as /proc/net/tcp writes them."""
    inodes = set[str]()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(fd))
            except OSError:
                continue
    found = set[str]()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTENING and f"socket:[{columns[9]}]" in inodes:
                found.add(columns[1].split(":")[0])
    return found


def test_a_run_on_one_host_listens_on_its_loopback_alone(tmp_path: Path) -> None:
    words = ["train", "--preset=tiny", "--batch.sequence_length=64", "--batch.global_batch_size=4", "--parallel.dp=2",
             "--steps=4000", f"--output.folder={tmp_path}", "--training.validation_every=0"]  # fmt: skip
    metrics = tmp_path / "latest" / "metrics.jsonl"
    with forks.begun(words, os.environ) as command:
        end = time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
            time.sleep(0.05)
        tasks = Path(f"/proc/{command.process.pid}/task").iterdir()
        ranks = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        assert len(ranks) == 2
        assert listens_at(ranks) == {"0100007F"}  # 127.0.0.1, of the store and of gloo
        assert listens_at([command.process.pid or 0]) == set()  # the store's socket is rank 0's


@contextmanager
def listener(host: str, *, several_hosts: bool = False) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with socket.socket(fileno=_listen(host, port, several_hosts=several_hosts)) as made:
        assert made.getsockname()[1] == port
        yield made


@at_a_free_port
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("several_hosts", [False, True])
def test_it_listens_at_the_address_of_its_name(host: str, several_hosts: bool) -> None:
    with listener(host, several_hosts=several_hosts) as made:
        assert made.getsockname()[0] in ("127.0.0.1", "::1")


@at_a_free_port
@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("192.0.2.1", "192.0.2.1"),  # nobody's: as behind a router that translates addresses
        ("node-7", "127.0.1.1"),  # what Debian's /etc/hosts says of a host's own name
    ],
)
def test_an_address_that_others_do_not_reach_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str, address: str
) -> None:
    row = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, port, **__: [(*row, (address, port))])
    with caplog.at_level(logging.WARNING, "penteract"), listener(host, several_hosts=True) as made:
        assert made.getsockname()[0] in ("::", "0.0.0.0")
    assert f"MASTER_ADDR {host} is no address of this host that others reach" in caplog.text


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with pytest.raises(PeerLost, match=rf"cannot be opened: .*in use.* · 127.0.0.1:{port} · fix: .* a free port"):
            open_store(place, 5.0)


def test_the_launchers_socket_is_the_stores() -> None:
    """Its port is taken from the moment that the launcher chose it."""
    server = socket.create_server(("127.0.0.1", 0))
    port = str(server.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    store = open_store(place, 5.0, server.detach())
    other = open_store(place | {"RANK": "1"}, 5.0)
    other.set("key", "value")
    assert store.get("key") == b"value"
