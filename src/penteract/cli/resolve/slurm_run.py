"""`penteract train --slurm`: the job of a run, submitted or printed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penteract.config.resolve.resolved_run import Resolved
from penteract.engine.run_folder import rundir
from penteract.errors import DiskFailure, PenteractError
from penteract.slurm.job_shape import JobShape, cost_line, job_shape, seconds_of
from penteract.slurm.run_job import BATCH, FOLDER, SUBMITTED, as_cpus, run_job
from penteract.slurm.slurm_calls import submit


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmRun:
    """A run to be submitted.

    file      its run file, which is copied: a later change does not reach the job. None: `words` say it all
    words     of `penteract train`, without the run file
    folder    of the run; None: a new one
    """

    resolved: Resolved
    file: Path | None
    words: Sequence[str]
    folder: Path | None = None

    def go(self, *, dry_run: bool, as_json: bool) -> int:
        """Submit, or print the batch file; returns the exit code. Raises BadInput, PeerLost, DiskFailure."""
        run = self.resolved.run
        slurm = as_cpus(run.slurm) if run.precision.device == "cpu" else run.slurm
        shape, limit = job_shape(run.layout.world, slurm), seconds_of(slurm.time)
        folder = (self.folder or rundir.free_name(run.out, run.model.name)).resolve()
        rundir.refuse_foreign(folder)
        words = [str(folder / FOLDER / SUBMITTED)] * (self.file is not None) + [*self.words]
        batch = run_job(slurm, shape, words, folder, Path.cwd(), sys.executable)
        cost = cost_line(shape, slurm, limit)
        job = None if dry_run else self._submit(batch, folder)
        if as_json:
            print(json.dumps(self._as_json(shape, limit, job, folder, batch)))
        elif dry_run:
            print(f"{batch}\n# {cost}")
        else:
            print(f"job {job}: {cost}\n{folder} · log: {FOLDER}/{job}.log")
        return 0

    def _submit(self, batch: str, folder: Path) -> str:
        """Write the job's files and submit it. A folder that was made for nothing is removed."""
        fresh = not folder.exists()
        try:
            (folder / FOLDER).mkdir(parents=True, exist_ok=True)
            (folder / FOLDER / BATCH).write_text(batch, encoding="utf-8")
            if self.file is not None:
                shutil.copyfile(self.file, folder / FOLDER / SUBMITTED)
            if fresh:
                rundir.write_status(folder, "queued")
            return submit(batch)
        except OSError as e:
            option = "--output.folder" if self.folder is None else "--into"
            raise DiskFailure("DISK", "could not write a job's files", where=str(e.filename or folder),
                              found=e.strerror, fix=f"choose another {option}") from e  # fmt: skip
        except PenteractError:
            if fresh:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _as_json(
        self, shape: JobShape, limit: float | None, job: str | None, folder: Path, batch: str
    ) -> dict[str, object]:
        hours = None if limit is None else shape.ranks * limit / 3600
        price = self.resolved.run.slurm.usd_per_gpu_hour
        usd = None if hours is None or not price else hours * price
        return {"job": job, "run": str(folder), "nodes": shape.nodes, "ranks": shape.ranks, "gpu_hours": hours,
                "usd": usd, "batch": batch}  # fmt: skip
