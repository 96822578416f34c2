"""How a rank is started: its environment, the store's socket, and its end with who started it. Imports no torch."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from penteract.engine.device.children import bound_to_parent
from penteract.engine.device.cpu_affinity import threads_of
from penteract.engine.rank.run_key import VARIABLE, new_key


def rank_environment(given: Mapping[str, str], rank: int, world: int, port: int) -> dict[str, str]:
    """The environment of a rank. Variables that the user has set keep their values."""
    # OpenMP threads spin for some microseconds, then sleep. Without spinning, waking them costs as much as a second
    # thread gains; with more, the ranks of a crowded host take each other's cores.
    defaults = {"OMP_NUM_THREADS": str(threads_of(world)), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "30000"}
    defaults |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if sys.platform == "linux":  # ranks of one host need no other interface, and nobody else reaches this one
        defaults |= {"GLOO_SOCKET_IFNAME": "lo"}
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    return defaults | dict(given) | {name: str(value) for name, value in place.items()}


def environments(given: Mapping[str, str], world: int, store: socket.socket) -> list[dict[str, str]]:
    """Those of all ranks of a run on this host, with one key."""
    port, key = store.getsockname()[1], {VARIABLE: new_key()}
    return [rank_environment(given, rank, world, port) | key for rank in range(world)]


def start_rank(
    words: Sequence[str], environment: Mapping[str, str], out: IO[bytes] | None, *inherited: int
) -> subprocess.Popen[bytes]:
    """Start `python WORDS` in a process group of its own, as only the launcher passes Ctrl-C on. It prints into `out`,
    or where this process does. `inherited`: open files that it gets."""
    return subprocess.Popen(
        [sys.executable, *words], env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
        pass_fds=inherited, process_group=0, preexec_fn=bound_to_parent(),
    )  # fmt: skip


def store_socket() -> socket.socket:
    """The socket of the ranks' store. Only this host reaches it: whoever reaches a store can write to it. Rank 0
    inherits it, so that nobody can take its port meanwhile."""
    return socket.create_server(("127.0.0.1", 0), backlog=1024)
