"""The four kinds of saves of `checkpoint_pause.py`: ours and those of torch.distributed.checkpoint, in one run."""

from __future__ import annotations

import filecmp
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from penteract.config.catalog import model as find_model
from penteract.config.layout import Layout
from penteract.config.precision.policy import policy
from penteract.config.resolve.resolved_run import resolve
from penteract.config.rules.kernel_limits import FA4, fastest_attention, installed_packages
from penteract.engine.executor.outcome import Outcome
from penteract.engine.rank.rank import join
from penteract.engine.session.checkpoints import Checkpoints
from penteract.engine.session.saved import state_slices
from penteract.engine.session.session import Session, SessionOptions

THREADS = 8  # of torch's writer; with its default of one it takes several times as long


class Saves(Protocol):
    """Saves of one kind."""

    def begin(self, at: Path) -> None:
        """Save the present state into the new folder `at`: return when training may go on."""
        ...

    def is_durable(self) -> bool:
        """Whether all of it is on the disk."""
        ...

    def is_under_way(self) -> bool:
        """Whether anything of it still goes on."""
        ...


def fast_kernels(device: str, model: str) -> list[str]:
    """The settings of the fastest kernels on this GPU; none on a CPU."""
    if device != "cuda":
        return []
    attention = fastest_attention(find_model(model), Layout(), policy("bf16"), installed_packages(FA4),
                                  capability=torch.cuda.get_device_capability())  # fmt: skip
    return [f"--kernels.attention={attention}", "--kernels.elementwise=triton", "--kernels.loss=chunked"]


class Run:
    """A run of one rank that trains `tokens` a step. Master weights and moments are fp32."""

    def __init__(self, folder: Path, model: str, device: str, tokens: int) -> None:
        """Open it."""
        length = min(4096, tokens // 4)
        words = [
            f"--output.folder={folder}", "--training.sample_tokens=0", "--training.validation_every=0",
            f"--batch.sequence_length={length}", f"--batch.global_batch_size={tokens // length}",
            f"--batch.micro_batch_size={4 if tokens >= 16_384 else 1}", "--training.steps=100000", "--checkpoint.every=99999",
            "--checkpoint.asynchronous=true", f"--precision.device={device}", "--data.pack_documents=false",
            "--precision.dtype=bf16", "--precision.master=fp32", *fast_kernels(device, model),
        ]  # fmt: skip
        folder.mkdir(parents=True)
        self.session = Session(resolve(None, model, words, world=1).run, join({}, device), SessionOptions(folder))
        self.session.open()
        self.number = 0
        self._pending: Callable[[], Outcome] | None = None

    def step(self) -> None:
        """Ask for a step, and wait for the one before, as `penteract train` does."""
        self.number += 1
        session, first = self.session, self.number * self.session.spec.layout.global_batch_size
        outcome = session.trainer.start(self.number, session.train, first)
        self.settle()
        self._pending = outcome
        if session.saver.background is not None:
            session.saver.background.poll()

    def settle(self) -> None:
        """Wait for the step that was asked for last."""
        if self._pending is not None:
            assert math.isfinite(self._pending().loss)
            self._pending = None

    def undisturbed(self, steps: int) -> float:
        """Seconds of a step, of so many together."""
        self.settle()
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.settle()
        return (time.perf_counter() - begun) / steps


class Ours:
    """Our saves, through what a run saves with: with its checks, and read back after the commit."""

    def __init__(self, run: Run, *, background: bool) -> None:
        self._run, self._background, self._checkpoints = run, background, run.session.checkpoints

    def begin(self, at: Path) -> None:
        at.mkdir()
        session, saver = self._run.session, self._run.session.saver
        assert saver.background is not None
        own = Checkpoints(at / "checkpoints", session.rank, keep=1, threads=session.checkpoints.threads)
        own.begin()
        self._checkpoints = saver.checkpoints = saver.background.checkpoints = own
        saver.save(background=saver.background if self._background else None)

    def is_durable(self) -> bool:
        return self._checkpoints.last > 0

    def is_under_way(self) -> bool:
        saver, before = self._run.session.saver, self._checkpoints.before
        assert saver.background is not None
        read_back = before is not None and before.read_back is not None and before.read_back.is_reading
        return saver.background.under_way or read_back


class AtOnce:
    """torch's `save`."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = dict(state)

    def begin(self, at: Path) -> None:
        dcp.save(self._state, storage_writer=dcp.FileSystemWriter(at, thread_count=THREADS))

    def is_durable(self) -> bool:
        return True

    def is_under_way(self) -> bool:
        return False


class Later:
    """torch's `async_save`. An update waits until the state is staged."""

    def __init__(self, state: Mapping[str, torch.Tensor], run: Run) -> None:
        self._state, self._saved, self._staged = dict(state), Any, Any
        cuda, size = run.session.rank.device.type == "cuda", sum(x.nbytes for x in state.values())
        # Its process gets the state through /dev/shm, which a container may not have; then a thread writes.
        self._shared = shutil.disk_usage("/dev/shm").free > 1.1 * size
        self._options = StagingOptions(cuda, self._shared, use_async_staging=True, use_non_blocking_copy=cuda)
        self._stager: DefaultStager | None = None
        self.staging = ("pinned, " if cuda else "") + "asynchronous, " + ("process" if self._shared else "thread")
        self._ours = run.session.trainer.run.before_update
        run.session.trainer.run.before_update = self._before_update

    def begin(self, at: Path) -> None:
        kind = AsyncCheckpointerType.PROCESS if self._shared else AsyncCheckpointerType.THREAD
        self.close()
        self._stager = DefaultStager(self._options)  # torch 2.11's fails at its second save (pytorch issue 183413)
        made: Any = dcp.async_save(
            self._state, storage_writer=dcp.FileSystemWriter(at, thread_count=THREADS), async_stager=self._stager,
            async_checkpointer_type=kind,
        )  # fmt: skip
        self._saved, self._staged = made.upload_completion, made.staging_completion

    def is_durable(self) -> bool:
        return self._saved.done() and self._saved.result() is not self

    def is_under_way(self) -> bool:
        return not self._saved.done()

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()

    def _before_update(self, bucket: int) -> None:
        if self._staged is not Any:
            self._staged.result()
        if self._ours is not None:
            self._ours(bucket)


class Torch:
    """torch's saves of the same numbers, in tensors of their own as its users have them."""

    def __init__(self, run: Run) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("gloo", rank=0, world_size=1)
        trainer = run.session.trainer
        state = {s.name: s.tensor.clone() for s in state_slices(trainer.program, trainer.state)}
        self.bytes = sum(x.nbytes for x in state.values())
        self.at_once, self.in_the_background = AtOnce(state), Later(state, run)


def differing_files(one: Path, other: Path) -> dict[str, Any]:
    """The files of two checkpoints, and the names of those that are not equal byte for byte."""
    names = sorted({str(at.relative_to(folder)) for folder in (one, other) for at in folder.rglob("*") if at.is_file()})
    differing = [n for n in names if not all((f / n).exists() for f in (one, other))
                 or not filecmp.cmp(one / n, other / n, shallow=False)]  # fmt: skip
    return {"files": names, "bytes": sum((one / n).stat().st_size for n in names if (one / n).exists()),
            "differing": differing}  # fmt: skip


def summary(saves: Mapping[str, list[dict[str, float]]], undisturbed: list[float]) -> dict[str, Any]:
    """Medians by kind; `pause_s`: what the time of a save was longer than its steps undisturbed."""
    step = median(undisturbed)
    found: dict[str, Any] = {"undisturbed_step_s": round(step, 5)}
    for name, rows in saves.items():
        pauses = [row["under_way_s"] - row["steps"] * step for row in rows]
        found[name] = {"pause_s": round(median(pauses), 4)} | {
            key: round(median(row[key] for row in rows), 4) for key in ("returns_s", "durable_s")
        }
    if (once := found.get("at once")) and (later := found.get("in the background")):
        found["pause_of_one_at_once"] = round(later["pause_s"] / once["pause_s"], 4)
    return found
