"""Runs on this machine's device that are killed while they save in the background, and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]

from checkpoint_kinds import fast_kernels

from penteract.engine.checkpoint.folder import committed
from run_records import children, digests, rows_so_far, steps_of

KILLED_AFTER, EVERY = 23, 4  # steps before the kill, at least, and those between saves
STEPS = {"cpu": 60, "cuda": 900}  # of a run; on a GPU many pass until the first save is committed
_LIMIT_S = 110.0
_SMALL = (
    "--preset=tiny", "--model.hidden_size=512", "--model.heads=8", "--model.kv_heads=4", "--model.head_size=64",
    "--model.ffn_size=1536", "--batch.sequence_length=1024", "--batch.global_batch_size=4",
    "--batch.micro_batch_size=2", "--training.sample_tokens=0", "--training.validation_every=0",
    f"--checkpoint.every={EVERY}", "--checkpoint.keep=0",
    "--checkpoint.asynchronous=true", "--precision.dtype=bf16", "--data.pack_documents=false",
)  # fmt: skip
_TINY = ("--batch.sequence_length=128", "--model.hidden_size=128", "--model.ffn_size=256", "--model.head_size=16")


def kernel_sets(device: str) -> Mapping[str, Sequence[str]]:
    """Settings by name: the fastest kernels of this GPU, and the same with the reference's attention."""
    if device != "cuda":
        return {"reference": _TINY}
    fastest = fast_kernels(device, "llama-3.2-1b")
    return {"fastest": fastest, "reference attention": [*fastest, "--kernels.attention=reference"]}


def killed_and_resumed(
    at: Path,
    device: str,
    sets: Mapping[str, Sequence[str]] | None = None,
    small: Sequence[str] = _SMALL,
    steps: int = 0,
) -> dict[str, Any]:
    """For each set of kernels whether a killed run ended as an undisturbed one. All runs go on beside each other.
    `small`: settings of all of them, which take `steps` steps; 0: those of the device."""
    sets, steps = sets or kernel_sets(device), steps or STEPS[device]
    processes = list[subprocess.Popen[bytes]]()

    def started(*words: str) -> subprocess.Popen[bytes]:
        processes.append(started_run(words))
        return processes[-1]

    def of(number: int, words: Sequence[str]) -> dict[str, Any]:
        whole, killed = at / f"whole{number}", at / f"killed{number}"
        given = [*small, *words, f"--precision.device={device}", f"--training.steps={steps}"]
        undisturbed = started(*given, f"--output.folder={whole}")
        cut = _kill(killed, started(*given, f"--output.folder={killed}"))
        _end(started(f"--resume={(killed / 'latest').resolve()}"))
        _end(undisturbed)
        return cut | _compared(whole, killed, cut["rows_at_kill"], steps)

    pool = ThreadPoolExecutor(len(sets))
    try:
        return dict(zip(sets, pool.map(of, range(len(sets)), sets.values()), strict=True))
    finally:
        for process in processes:
            process.kill()  # its ranks end with it
        pool.shutdown(wait=False, cancel_futures=True)


def started_run(words: Sequence[str], gpus: str = "") -> subprocess.Popen[bytes]:
    """`penteract train WORDS`, which prints nothing. `gpus`: those that it sees, such as 0,1; by default all."""
    seen = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
    path = os.pathsep.join((str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")))
    return subprocess.Popen(
        [sys.executable, "-m", "penteract", "train", *words], start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path} | seen,
    )  # fmt: skip


def _kill(folder: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Kill the run and all its processes once so many steps are done, and one is saved."""
    until = time.monotonic() + _LIMIT_S
    while rows_so_far(folder / "latest") < KILLED_AFTER or not committed(folder / "latest" / "checkpoints"):
        if process.poll() is not None or time.monotonic() > until:
            _end(process)
            raise RuntimeError(f"the run has ended before it was killed, after row {rows_so_far(folder / 'latest')}")
        time.sleep(0.002)
    kill_run(process)
    rows, held = rows_so_far(folder / "latest"), committed(folder / "latest" / "checkpoints")
    return {"rows_at_kill": rows, "resumed_from": held[0].step if held else 0}


def kill_run(process: subprocess.Popen[bytes]) -> None:
    """Kill a run, its launcher and all of its ranks, and wait for it."""
    for group in (*children(process.pid), process.pid):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    _, said = process.communicate(timeout=_LIMIT_S)
    if process.returncode:
        raise RuntimeError(f"a run ended with {process.returncode}: {said.decode()[-2000:]}")


def _compared(whole: Path, killed: Path, before: int, steps: int) -> dict[str, Any]:
    """`bitwise`: losses, norms and the last checkpoint are equal. `deterministic`: steps before the kill are."""
    one, other = steps_of(whole / "latest"), steps_of(killed / "latest")
    differing = [a[0] for a, b in zip(one, other, strict=True) if a != b]
    same = _last_digests(whole, steps) == _last_digests(killed, steps)
    return {"steps": len(one), "bitwise": not differing and same and len(one) == steps,
            "deterministic": not [n for n in differing if n <= before], "first_differing_step": min(differing, default=0),
            "last_checkpoint_equal": same}  # fmt: skip


def _last_digests(folder: Path, steps: int) -> dict[str, list[str]]:
    newest = committed(folder / "latest" / "checkpoints")[0]
    if newest.step != steps:
        raise RuntimeError(f"the newest checkpoint is of step {newest.step}")
    return digests(newest.at)
