"""Checkpoints outside of the run's folder: on another disk, found by every command, and never shared by two runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import forks
from in_memory import elsewhere
from penteract.engine import checkpoint
from penteract.engine.checkpoint import committed
from penteract.engine.checkpoint.durable import Room
from penteract.engine.run_folder import checkpoint_folder, rundir
from penteract.engine.run_folder.checkpoint_folder import CLAIM, ID, find, make, of_resumed, release, run_of, settle
from penteract.engine.session.checkpoints import Checkpoints
from penteract.errors import BadInput, DiskFailure
from run_records import digests
from sent_again import links_twice

SMALL = (
    "--preset=tiny", "--batch.sequence_length=64", "--batch.global_batch_size=4", "--batch.micro_batch_size=1",
    "--training.sample_tokens=0", "--training.validation_every=0", "--checkpoint.every=2",
)  # fmt: skip
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def penteract(at: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """A command in the working directory `at`."""
    return forks.penteract([str(word) for word in words], ENVIRONMENT, folder=at)


def refused(done: subprocess.CompletedProcess[str], *says: str) -> None:
    """It ended with 2 and one line."""
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    for text in says:
        assert text in done.stderr


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A folder in another file system than `tmp_path`, where there is one."""
    with tempfile.TemporaryDirectory(dir=elsewhere(tmp_path) or tmp_path) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """(working directory, folder of checkpoints) of a run of four steps on two ranks, in two file systems."""
    at = tmp_path_factory.mktemp("trained")
    with tempfile.TemporaryDirectory(dir=elsewhere(at)) as there:
        chosen = os.path.relpath(Path(there) / "deep" / "ours", at)
        done = penteract(at, "train", *SMALL, "--steps=4", "--parallel.dp=2", f"--checkpoint.folder={chosen}")
        assert done.returncode == 0, done.stderr
        yield at, Path(there) / "deep" / "ours"


@pytest.fixture
def run(trained: tuple[Path, Path], tmp_path: Path, scratch: Path) -> tuple[Path, Path]:
    """The same: its own copies of both, in `tmp_path` and `scratch`."""
    at, there = trained
    shutil.copytree(at / "runs", tmp_path / "runs", symlinks=True)
    shutil.copytree(there, scratch / "ours")
    path = (tmp_path / "runs" / "latest").resolve()
    (path / "checkpoints").unlink()
    (path / "checkpoints").symlink_to(scratch / "ours")
    row = json.loads((scratch / "ours" / CLAIM).read_text())
    (scratch / "ours" / CLAIM).write_text(json.dumps(row | {"run": str(path)}))
    toml = (path / "run.toml").read_text()
    (path / "run.toml").write_text(toml.replace(str(there), str(scratch / "ours")))
    return path, scratch / "ours"


def test_they_lie_in_another_file_system(trained: tuple[Path, Path]) -> None:
    at, there = trained
    path = (at / "runs" / "latest").resolve()
    if elsewhere(path) is not None:
        assert there.stat().st_dev != path.stat().st_dev
    assert [c.step for c in committed(there)] == [4, 2]
    assert (path / "checkpoints").readlink() == there
    assert f'folder = "{there}"' in (path / "run.toml").read_text()
    written = {f.parent.parent.name for f in path.rglob("*.safetensors")}
    assert written == {"step-1-gradients"}  # not a checkpoint


def test_every_command_finds_them(run: tuple[Path, Path], tmp_path: Path) -> None:
    path, there = run
    listed = penteract(tmp_path, "checkpoints", "latest", "--verify", "--json")
    assert listed.returncode == 0, listed.stderr
    assert [row["step"] for row in json.loads(listed.stdout)["checkpoints"]] == [4, 2]
    looked = penteract(tmp_path, "doctor", path)
    assert f"checkpoints of {path} are in {there}" in looked.stdout
    for number, name in enumerate(("latest", path / "checkpoints" / "step-00000004", there / "step-00000004")):
        done = penteract(tmp_path, "convert", name, f"hf-{number}")
        assert done.returncode == 0, done.stderr
    begun = penteract(tmp_path, "train", *SMALL, "--init=latest", "--steps=1", f"--checkpoint.folder={there}-2")
    assert begun.returncode == 0, begun.stderr
    pruned = penteract(tmp_path, "checkpoints", path, "--prune=1", "--json")
    assert pruned.returncode == 0, pruned.stderr


def test_a_resume_on_another_layout_is_that_of_a_run_with_its_own_folder(
    run: tuple[Path, Path], tmp_path: Path
) -> None:
    path, there = run
    done = penteract(tmp_path / "runs", "train", f"--resume={path}", "--steps=6", "--parallel.dp=1")
    assert done.returncode == 0, done.stderr
    done = penteract(tmp_path, "train", *SMALL, "--steps=4", "--parallel.dp=2", "--output.folder=plain")
    assert done.returncode == 0, done.stderr
    done = penteract(tmp_path, "train", "--resume=latest", "--output.folder=plain", "--steps=6", "--parallel.dp=1")
    assert done.returncode == 0, done.stderr
    plain = tmp_path / "plain" / "latest" / "checkpoints" / "step-00000006"
    assert digests(there / "step-00000006") == digests(plain)
    assert not (tmp_path / "plain" / "latest" / "checkpoints").is_symlink()


def test_a_claim_whose_answer_was_lost_is_the_runs_own(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", links_twice)
    (tmp_path / "run").mkdir()
    make(tmp_path / "run", str(scratch / "at"))
    assert find(tmp_path / "run", write=True).is_dir()
    assert [path.name for path in (scratch / "at").iterdir()] == [CLAIM]


# ---- two runs --------------------------------------------------------------------------------------------------------


def test_a_folder_that_another_run_has_is_refused_and_nothing_is_made(run: tuple[Path, Path], tmp_path: Path) -> None:
    path, there = run
    before = sorted(p.name for p in tmp_path.rglob("*"))
    done = penteract(tmp_path, "train", *SMALL, "--steps=1", f"--checkpoint.folder={there}")
    refused(done, "error[FOLDER]: another run has this folder of checkpoints · checkpoint.folder · found ",
            f"{there} of {path} · fix: ", f"or --resume {path}")  # fmt: skip
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["filled", "a file", "of runs", "null byte", "loop", "garbled claim"])
def test_what_is_no_folder_of_its_own_is_refused(tmp_path: Path, scratch: Path, kind: str) -> None:
    at, chosen = tmp_path, str(scratch / "at")
    if kind == "filled":
        (scratch / "at").mkdir()
        (scratch / "at" / "other").touch()
    elif kind == "a file":
        (scratch / "at").touch()
    elif kind == "of runs":
        chosen = str(tmp_path)
    elif kind == "null byte":
        chosen = "a\0b"
    elif kind == "loop":
        (scratch / "at").symlink_to(scratch / "at")
    else:
        (scratch / "at").mkdir()
        (scratch / "at" / CLAIM).write_text("{")
    with pytest.raises(BadInput, match=r"checkpoint\.folder") as failed:
        checkpoint_folder.refuse_used_folder(checkpoint_folder.absolute(chosen), str(at / "runs"))
    assert failed.value.exit_code == 2 and "\n" not in str(failed.value) and "\0" not in str(failed.value)


def test_of_runs_that_start_at_once_one_gets_it(tmp_path: Path, scratch: Path) -> None:
    runs = [tmp_path / f"run-{i}" for i in range(8)]
    for path in runs:
        path.mkdir()

    def one(path: Path) -> BadInput | None:
        try:
            make(path, str(scratch / "at"))
        except BadInput as e:
            return e
        return None

    with ThreadPoolExecutor(8) as pool:
        errors = list(pool.map(one, runs))
    (winner,) = [path for path, error in zip(runs, errors, strict=True) if error is None]
    assert find(winner, write=True).is_dir()
    assert all(str(winner) in str(error) for error in errors if error is not None)


def test_a_run_that_saved_nothing_gives_it_up(tmp_path: Path, scratch: Path) -> None:
    """It finds no room; the next run may have the folder."""
    words = [
        "train",
        *SMALL[:-1],
        f"--checkpoint.folder={scratch / 'at'}",
        "--checkpoint.every=1",
        "--checkpoint.keep=0",
    ]
    done = penteract(tmp_path, *words, "--steps=100000000")
    assert done.returncode == 74, done.stderr
    assert "no room for the checkpoints to come: 100000000 of" in done.stderr and "--checkpoint.folder" in done.stderr
    assert not (scratch / "at" / CLAIM).exists()
    done = penteract(tmp_path, *words, "--steps=1")
    assert done.returncode == 0, done.stderr
    assert [c.step for c in committed(scratch / "at")] == [1]


def test_a_copied_run_may_read_but_not_write(run: tuple[Path, Path], tmp_path: Path) -> None:
    path, _ = run
    copy = tmp_path / "runs" / "copy"
    shutil.copytree(path, copy, symlinks=True)
    assert penteract(tmp_path, "checkpoints", copy).returncode == 0
    refused(penteract(tmp_path, "checkpoints", copy, "--prune=1"), "another run has this folder", str(path))
    refused(penteract(tmp_path, "train", f"--resume={copy}", "--steps=6"), "another run has this folder", str(path))
    assert [c.step for c in committed(path / "checkpoints")] == [4, 2]


def test_a_link_alone_leads_nowhere(run: tuple[Path, Path], tmp_path: Path, scratch: Path) -> None:
    """A run's folder from elsewhere, whose link points at what is not its own."""
    path, there = run
    hostile = tmp_path / "runs" / "hostile"
    shutil.copytree(path, hostile, symlinks=True)
    (hostile / ID).write_text("another\n")
    refused(penteract(tmp_path, "checkpoints", hostile, "--prune=1"), "the folder of checkpoints is not this run's")
    (there / CLAIM).unlink()
    refused(penteract(tmp_path, "train", f"--resume={path}", "--steps=6"), f"allowed one with its {CLAIM}")
    assert [c.step for c in committed(there)] == [4, 2]


# ---- moved and missing -----------------------------------------------------------------------------------------------


def test_a_missing_folder_is_one_line_for_every_command(run: tuple[Path, Path], tmp_path: Path) -> None:
    path, there = run
    earlier = penteract(tmp_path, "train", *SMALL, "--steps=1")  # an older run must not be taken in its place
    assert earlier.returncode == 0, earlier.stderr
    (tmp_path / "runs" / "latest").unlink()
    (tmp_path / "runs" / "latest").symlink_to(path.name)
    there.rename(there.with_name("moved"))
    for words in (["train", "--resume=latest", "--steps=6"], ["train", *SMALL, "--init=latest"], ["checkpoints"],
                  ["checkpoints", "--prune=1"], ["convert", "latest", "hf"]):  # fmt: skip
        refused(penteract(tmp_path, *words), "error[CHECKPOINT]: the run's folder of checkpoints is not there",
                f"found {there} · fix: mount it or bring it back")  # fmt: skip
    looked = penteract(tmp_path, "doctor", path)
    assert looked.returncode == 2 and "the run's folder of checkpoints is not there" in looked.stdout
    assert not there.exists() and not (tmp_path / "hf").exists()


def test_a_moved_folder_and_a_moved_run_are_found_again(run: tuple[Path, Path], tmp_path: Path) -> None:
    path, there = run
    moved, other = there.with_name("moved"), path.with_name("other")
    there.rename(moved)
    path.rename(other)
    refused(penteract(tmp_path, "train", f"--resume={other}", "--steps=6", f"--checkpoint.folder={tmp_path}"),
            "the folder of checkpoints is not this run's")  # fmt: skip
    done = penteract(tmp_path, "train", f"--resume={other}", "--steps=6", f"--checkpoint.folder={moved}")
    assert done.returncode == 0, done.stderr
    assert (other / "checkpoints").readlink() == moved
    assert json.loads((moved / CLAIM).read_text())["run"] == str(other)
    assert committed(moved)[0].step == 6
    again = penteract(tmp_path, "train", f"--resume={other}", "--steps=7")  # its run file knows
    assert again.returncode == 0, again.stderr


def test_a_run_keeps_its_folder(run: tuple[Path, Path], tmp_path: Path) -> None:
    path, there = run
    refused(penteract(tmp_path, "train", f"--resume={path}", "--steps=6", "--checkpoint.folder=inside"),
            f"a run keeps its folder of checkpoints · checkpoint.folder · found inside / allowed {there}")  # fmt: skip
    done = penteract(tmp_path, "train", *SMALL, "--steps=1")
    assert done.returncode == 0, done.stderr
    refused(penteract(tmp_path, "train", "--resume=latest", "--steps=2", f"--checkpoint.folder={there.parent / 'new'}"),
            "a run keeps its folder of checkpoints")  # fmt: skip


def test_a_folder_that_cannot_be_made_is_a_failure_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskFailure, match=r"cannot be used .*fix: choose another --checkpoint.folder"):
        rundir.create(tmp_path / "runs", "tiny", checkpoints=str(tmp_path / "file" / "in"))


# ---- the disk --------------------------------------------------------------------------------------------------------


def test_room_and_epochs_are_those_of_the_folder(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    (tmp_path / "run").mkdir()
    make(tmp_path / "run", str(scratch / "at"))
    rank = SimpleNamespace(number=0, world=1, one_of=lambda error: error)
    kept = Checkpoints(tmp_path / "run" / "checkpoints", rank, keep=1, epoch=3)  # type: ignore[arg-type]
    kept.begin()
    assert (scratch / "at" / "work-000003").is_dir()
    asked = list[Path]()
    monkeypatch.setattr(checkpoint, "room", lambda folder: asked.append(folder.resolve()) or Room(10, None))
    with pytest.raises(DiskFailure, match=r"fix: another --checkpoint\.folder"):
        kept.check_room(100, 1)
    assert asked == [scratch / "at"]
    (scratch / "at").rename(scratch / "gone")
    with pytest.raises(BadInput, match="is not there"):
        kept.begin()
    assert checkpoint_folder.is_missing(tmp_path / "run")


def test_what_belongs_to_whom(tmp_path: Path, scratch: Path) -> None:
    """The functions alone: a run with a folder inside, and one with a folder elsewhere."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for path, chosen in ((inside, "inside"), (outside, str(scratch / "at"))):
        path.mkdir()
        make(path, chosen)
        (path / "run.toml").touch()
        (path / "checkpoints" / "step-00000001").mkdir()
        assert run_of(path / "checkpoints" / "step-00000001") == path
        assert of_resumed(path, chosen).samefile(path / "checkpoints")
        settle(path, of_resumed(path, chosen))
        release(path)  # a step is there
    assert run_of(scratch / "at" / "step-00000001") == outside
    assert (scratch / "at" / CLAIM).exists()
    assert run_of(scratch / "none" / "step-00000001") is None
