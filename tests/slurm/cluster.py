"""A Slurm of our own: two nodes on this machine, in a temporary folder, on free ports, stopped by pid.

munged, mariadbd, slurmdbd, slurmctld and two slurmd run in the foreground as children of `keeper.py`, which ends all
that belongs to the folder when this process ends, however it ends.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

PROGRAMS = ("munged", "mariadbd", "mariadb-install-db", "mariadb", "slurmdbd", "slurmctld", "slurmd", "sbatch", "sacct")
PACKAGES = "slurm-wlm munge mariadb-server slurmdbd"
NODES, CORES, MEMORY_MIB = ("n1", "n2"), 8, 6000
_KEEPER = Path(__file__).with_name("keeper.py")
_CGROUPS = Path("/sys/fs/cgroup")
_UP_S = 90.0


def missing() -> str:
    """Why there can be no Slurm here; "" if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install --no-install-recommends {PACKAGES}"
    return "" if os.geteuid() == 0 else "its daemons need root"


def memory_cgroups() -> bool:
    """Whether groups that limit memory can be made here; else only Slurm's own accounting looks at memory."""
    root = _CGROUPS / "memory"  # version 1: what Debian's Slurm makes does not need systemd there
    probe = root / f"penteract-{os.getpid()}"
    try:
        probe.mkdir()
        try:
            return (probe / "memory.limit_in_bytes").exists() and (_CGROUPS / "freezer").is_dir()
        finally:
            probe.rmdir()
    except OSError:
        return False


@dataclass
class Cluster:
    """Runs while it is entered. `cgroups`: whether memory is limited by control groups, or by Slurm's accounting."""

    folder: Path
    cgroups: bool
    accounting: bool = True
    ports: dict[str, int] = field(default_factory=dict[str, int])
    _keeper: subprocess.Popen[str] | None = None

    def __enter__(self) -> Cluster:
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o755)  # munged wants its socket where everyone may look
        self._keeper = subprocess.Popen([sys.executable, str(_KEEPER), str(self.folder)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *about: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.stdin.close()
            self._keeper.wait(60)

    @property
    def environment(self) -> dict[str, str]:
        """Of whoever asks this Slurm."""
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *words: str, check: bool = True) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        self._daemon(f"slurmd-{name}", "slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """A node fails: its slurmd and all that it has started end at once."""
        self._ask(f"kill {name}")

    def logs(self) -> str:
        """The last lines of every daemon, for a failure."""
        return "\n".join(f"== {at.name}\n{at.read_text(errors='replace')[-1500:]}" for at in self.folder.glob("*.out"))

    # ---- starting ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        at = self.folder
        self.ports = dict(zip(("db", "dbd", "ctl", *NODES), free_ports(3 + len(NODES)), strict=True))
        key = at / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._daemon("munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={at}/munge.sock",
                     f"--pid-file={at}/munged.pid", f"--log-file={at}/munged.log",
                     f"--seed-file={at}/munge.seed")  # fmt: skip
        if self.accounting:
            self._start_database()
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (at / name).mkdir()
        (at / "slurm.conf").write_text(self._config())
        (at / "cgroup.conf").write_text(_CGROUP if self.cgroups else "")
        if self.accounting:
            self._daemon("slurmdbd", "slurmdbd", "-D")
            wait(lambda: _listens(self.ports["dbd"]), _UP_S, "slurmdbd")
        self._daemon("slurmctld", "slurmctld", "-D", "-i")
        wait(lambda: _listens(self.ports["ctl"]), _UP_S, "slurmctld")
        for node in NODES:
            self.start_node(node)
        wait(self._idle, _UP_S, "two idle nodes")

    def _idle(self) -> bool:
        return self.call("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D", check=False).strip() == str(len(NODES))

    def _start_database(self) -> None:
        at, sock = self.folder, self.folder / "db.sock"
        subprocess.run(["mariadb-install-db", "--no-defaults", f"--datadir={at}/db", "--user=root", "--skip-test-db",
                        "--auth-root-authentication-method=normal"], check=True, capture_output=True)  # fmt: skip
        self._daemon("mariadbd", "mariadbd", "--no-defaults", f"--datadir={at}/db", f"--socket={sock}", "--user=root",
                     f"--port={self.ports['db']}", "--bind-address=127.0.0.1", f"--pid-file={at}/db.pid",
                     "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900")  # fmt: skip
        secret = secrets.token_hex(16)
        users = "; ".join(f"create user slurm@'{host}' identified by '{secret}'; grant all on slurm.* to slurm@'{host}'"
                          for host in ("127.0.0.1", "localhost"))  # fmt: skip
        query = ["mariadb", "--no-defaults", f"--socket={sock}", "-uroot", "-e", f"create database slurm; {users}"]
        wait(lambda: subprocess.run(query, capture_output=True, check=False).returncode == 0, _UP_S, "mariadbd")
        conf = at / "slurmdbd.conf"
        conf.touch(0o600)
        conf.write_text(_DATABASE.format(at=at, port=self.ports["dbd"], db=self.ports["db"], secret=secret))

    def _config(self) -> str:
        host = socket.gethostname()
        values = {"at": self.folder, "host": host, "ctl": self.ports["ctl"], "dbd": self.ports["dbd"]}
        lines = [_COMMON.format(**values), _WITH_CGROUPS if self.cgroups else _WITHOUT_CGROUPS]
        lines.append(
            _ACCOUNTING.format(**values) if self.accounting else "AccountingStorageType=accounting_storage/none"
        )
        lines += [f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={self.ports[node]} CPUs={CORES} "
                  f"RealMemory={MEMORY_MIB}" for node in NODES]  # fmt: skip
        return "\n".join([*lines, _PARTITIONS])

    def _daemon(self, name: str, *words: str) -> None:
        self._ask("\t".join(("start", name, *words)))

    def _ask(self, order: str) -> None:
        assert self._keeper is not None and self._keeper.stdin is not None and self._keeper.stdout is not None
        print(order, file=self._keeper.stdin, flush=True)
        answer = self._keeper.stdout.readline()
        assert answer == "done\n", f"{order!r}: {answer!r}"


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody has now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def wait(for_it: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until `for_it()` holds; fails after some seconds."""
    until = time.monotonic() + seconds
    while not for_it():
        assert time.monotonic() < until, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.2)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


# cred_expire: a job that is queued again waits until its credential has expired, two minutes by default.
_COMMON = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctl}
AuthType=auth/munge
AuthInfo=socket={at}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool-%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd-%n.pid
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
DefMemPerCPU=300
ReturnToService=2
KillWait=20
SlurmdTimeout=10
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE"""
_WITH_CGROUPS = """\
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
JobAcctGatherType=jobacct_gather/linux"""
_CGROUP = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
"""
_WITHOUT_CGROUPS = """\
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill"""
_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={dbd}
AccountingStoragePass={at}/munge.sock"""
_DATABASE = """\
AuthType=auth/munge
AuthInfo=socket={at}/munge.sock
DbdHost=localhost
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={db}
StorageUser=slurm
StoragePass={secret}
StorageLoc=slurm
PidFile={at}/slurmdbd.pid
LogFile={at}/slurmdbd.log
"""
_PARTITIONS = """\
PartitionName=low Nodes=n[1-2] Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=20
PartitionName=high Nodes=n[1-2] MaxTime=INFINITE PriorityTier=9 PreemptMode=OFF
"""
