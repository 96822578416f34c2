"""The store where the ranks of a run meet before they have a process group."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from penteract.engine.rank.roll_call import WARN_S
from penteract.errors import PeerLost

log = logging.getLogger("penteract")


def agent_holds_store(environment: Mapping[str, str]) -> bool:
    """Whether torchrun's agent holds the store, and not rank 0."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(
    environment: Mapping[str, str], limit: float, listener: int | None = None
) -> dist.distributed_c10d.Store:  # fmt: skip
    """The store at MASTER_ADDR:MASTER_PORT: torchrun's agent holds it, else rank 0 does.

    `listener`: the file descriptor of a socket that listens there already. Waits at most `limit` seconds for the store.
    Raises PeerLost.
    """
    host, port = environment.get("MASTER_ADDR", ""), int(environment.get("MASTER_PORT", "0"))
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    agents = agent_holds_store(environment)
    try:
        if rank or agents:
            _reach(host, port, limit)
        if agents:
            store, _, _ = next(rendezvous("env://", rank, world, timeout=timedelta(seconds=limit)))
            return store
        if rank == 0 and listener is None:
            listener = _listen(host, port, several_hosts=world > int(environment.get("LOCAL_WORLD_SIZE", world)))
        # Nobody waits in here for the others: the roll call does, and says for whom.
        return TCPStore(
            host, port, world, is_master=rank == 0, timeout=timedelta(seconds=limit), wait_for_workers=False,
            master_listen_fd=listener if rank == 0 else None,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError) as e:
        raise PeerLost("JOIN", f"the store of the ranks cannot be opened: {' '.join(str(e).split())[:160]}",
                       where=f"{host}:{port}",
                       fix="the same MASTER_ADDR and MASTER_PORT on every rank, and a free port") from e  # fmt: skip


def _listen(host: str, port: int, *, several_hosts: bool) -> int:
    """A file descriptor that listens at `host` alone. On all interfaces, which is said, where that is not possible: the
    address is not one of this host's, or other hosts cannot reach it."""
    found = [(family, at) for family, _, _, _, at in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    literal = host == "localhost" or host.startswith("127.") or host == "::1"
    # Debian's /etc/hosts gives a host's own name an address of the loopback.
    beyond = several_hosts and not literal and all(str(at[0]).startswith(("127.", "::1")) for _, at in found)
    for family, at in () if beyond else found:
        try:
            return socket.create_server((str(at[0]), port), family=family, backlog=1024).detach()
        except OSError as e:
            if e.errno != errno.EADDRNOTAVAIL:
                raise
    log.warning("MASTER_ADDR %s is no address of this host that others reach: its store listens on all", host)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=dual).detach()


def _reach(host: str, port: int, limit: float) -> None:
    """Wait until the store's host takes connections. torch's own client would wait in silence."""
    began, warned = time.monotonic(), False
    while True:
        try:
            with socket.create_connection((host, port), timeout=min(5.0, limit)):
                return
        except OSError as e:
            waited = time.monotonic() - began
            if waited > limit:
                raise PeerLost("JOIN", f"rank 0 does not answer for {limit:.0f} s: {e}", where=f"{host}:{port}",
                               fix="see what rank 0 prints; every rank needs its MASTER_PORT") from e  # fmt: skip
            if waited > WARN_S and not warned:
                log.warning("waiting for rank 0 at %s:%d · up to %.0f s (limits.join)", host, port, limit)
                warned = True
        time.sleep(0.1)
