"""Starts the daemons of a Slurm of ours, and ends them, and all that they have started, when its input ends: whoever
asked for them has ended then, perhaps killed. Standard library alone.

What belongs to a folder is found by pid: our children, and processes whose SLURM_CONF lies in it. slurmstepd and the
jobs leave the process tree, but keep that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(folder: Path) -> None:
    children = dict[str, subprocess.Popen[bytes]]()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the end of its input ends it
    for line in sys.stdin:
        order, _, rest = line.rstrip("\n").replace("\t", " ", 1).partition(" ")
        if order == "start":
            name, *words = rest.split("\t")
            with (folder / f"{name}.out").open("ab") as out:
                children[name] = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                    env=os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "KEEPER_NODE": name},
                )  # fmt: skip
        else:
            node = f"slurmd-{rest}"
            end(
                [*belonging(f"KEEPER_NODE={node}", folder), *belonging(f"SLURMD_NODENAME={rest}", folder)],
                signal.SIGKILL,
            )
            children.pop(node).wait()
        print("done", flush=True)
    mine = f"SLURM_CONF={folder / 'slurm.conf'}"
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        until = time.monotonic() + patience
        end([child.pid for child in children.values() if child.poll() is None] + belonging(mine, folder), number)
        while time.monotonic() < until and (
            belonging(mine, folder) or any(c.poll() is None for c in children.values())
        ):
            time.sleep(0.1)


def belonging(variable: str, folder: Path) -> list[int]:
    """Processes that have `variable` in their environment, and this folder's SLURM_CONF."""
    wanted = {variable.encode(), f"SLURM_CONF={folder / 'slurm.conf'}".encode()}
    found = list[int]()
    for at in Path("/proc").iterdir():
        if at.name.isdigit() and int(at.name) != os.getpid():
            try:
                if wanted <= set((at / "environ").read_bytes().split(b"\0")) and not _is_gone(at):
                    found.append(int(at.name))
            except OSError:  # it has ended
                continue
    return found


def _is_gone(at: Path) -> bool:
    return (at / "stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")


def end(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main(Path(sys.argv[1]))
