"""Nothing of a Slurm of ours outlives whoever started it, even one that was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from slurm.cluster import Cluster, wait
from slurm.keeper import belonging

SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from slurm.cluster import Cluster
with Cluster(Path({folder!r}), cgroups=False, accounting=False) as cluster:
    print(cluster.call("sbatch", "--parsable", "-o/dev/null", "--wrap", "sleep 600"), flush=True)
    time.sleep(600)
"""


def test_a_slurm_ends_with_who_started_it(tmp_path: Path, slurm: Cluster) -> None:
    folder = tmp_path / "of"
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]), folder=str(folder))
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline().strip() == "1"
    mine = f"SLURM_CONF={folder / 'slurm.conf'}"

    def jobs() -> list[int]:
        return [pid for pid in belonging(mine, folder) if b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    wait(jobs, 60, "a job that runs")
    assert len(belonging(mine, folder)) >= 5  # munged, slurmctld, two slurmd, and the job
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait(lambda: not belonging(mine, folder), 30, "the end of its daemons and jobs")
    assert slurm.call("sinfo", "-h", "-p", "low", "-o", "%D").strip()  # others are left alone
