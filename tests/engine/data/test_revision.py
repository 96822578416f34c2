"""A run keeps the commit of its Hugging Face dataset, and resumes with the rows of that commit, or says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import forks
from penteract.engine.data import pin
from penteract.engine.session.outputs.metrics import read_metrics
from penteract.errors import BadInput

OLD, NEW = "a" * 40, "b" * 40


class Hub(ThreadingHTTPServer):
    """What the hub says of a dataset: its commits by name. It can be told to forget one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.commits = {"main": OLD, OLD: OLD, "v1": OLD}
        self.asked: list[str] = []

    @property
    def at(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        name, _, revision = self.path.partition("?")[0].removeprefix("/api/datasets/").partition("/revision/")
        self.server.asked.append(revision)
        commit = self.server.commits.get(revision or "main") if name == "org/name" else None
        body = json.dumps({"id": name, "sha": commit, "siblings": [], "tags": []}).encode() if commit else b""
        self.send_response(200 if commit else 404)
        if not commit:
            self.send_header("X-Error-Code", "RevisionNotFound" if name == "org/name" else "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", server.at)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server
        server.shutdown()


def unheard(line: str) -> None:
    raise AssertionError(line)


@pytest.mark.parametrize("revision", ["auto", "main", "v1", OLD])
def test_any_name_of_a_revision_is_its_commit(hub: Hub, revision: str) -> None:
    assert pin("hf:org/name:config", revision, unheard) == OLD
    hub.commits["main"] = NEW
    assert pin("hf:org/name", revision, unheard) == (NEW if revision in ("auto", "main") else OLD)


def test_a_commit_that_is_gone_is_one_line(hub: Hub) -> None:
    with pytest.raises(BadInput) as failed:
        pin("hf:org/name", NEW, unheard)
    assert str(failed.value) == (
        "error[REVISION]: the dataset no longer has this revision, or never had it · data.revision of hf:org/name · "
        f"found {NEW} · fix: --data.revision auto --data.allow_change true goes on with the newest"
    )
    with pytest.raises(BadInput, match="could not open the dataset · hf:org/none · found"):
        pin("hf:org/none", "auto", unheard)


def test_other_sources_have_no_commit(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "t.txt").write_text("text")
    for source in ("builtin", str(tmp_path / "t.txt"), ("t.txt", "builtin"), "hf:mine"):
        assert pin(source, "auto", unheard) == "auto"
    assert hub.asked == []


def test_a_hub_that_does_not_answer_is_said(hub: Hub, tmp_path: Path) -> None:
    """Unless the commit is known: it is named, or the hub's cache has it."""
    hub.shutdown()
    hub.server_close()
    said = list[str]()
    assert pin("hf:org/name", "auto", said.append) == "auto"
    (line,) = said
    assert line.startswith("the commit of hf:org/name is not known, because the hub does not answer (")
    assert "\n" not in line
    assert pin("hf:org/name", OLD, unheard) == OLD
    refs = tmp_path / "cache" / "datasets--org--name" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(NEW)
    assert pin("hf:org/name", "auto", unheard) == NEW
    (refs / "main").write_text("no commit")
    assert pin("hf:org/name", "auto", said.append) == "auto" and len(said) == 2


def test_without_the_library_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(BadInput, match=r'fix: pip install "penteract\[hf\]"'):
        pin("hf:org/name", "auto", unheard)


# ---- runs ------------------------------------------------------------------------------------------------------------

DATASETS = '''
"""In the place of the library: rows that differ between revisions, and a note of who asks for which."""
from listed_rows import ListedRows
__version__ = "3"
def load_dataset(name, config, *, split, streaming, revision):
    open("asked", "a").write(f"{revision} ")
    return ListedRows([{"text": f"document {i} of {name} at {revision}"} for i in range(4000)])
'''
SMALL = (
    "--preset=tiny", "--batch.sequence_length=64", "--batch.global_batch_size=4", "--batch.micro_batch_size=1",
    "--training.sample_tokens=0", "--training.validation_every=0", "--data.source=hf:org/name",
)  # fmt: skip


def train(at: Path, hub: Hub, *words: str, ranks: int = 0) -> list[subprocess.CompletedProcess[str]]:
    """`penteract train`; `ranks`: started as torchrun would, not by our launcher."""
    (at / "datasets.py").write_text(DATASETS)
    place = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    place |= {"HF_ENDPOINT": hub.at, "HF_HOME": str(at / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    if ranks:
        return forks.ranks([["train", *words]] * ranks, place, folder=at)
    return [forks.penteract(["train", *words], place, folder=at)]


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_resumed_run_reads_the_rows_of_its_first_start(hub: Hub, tmp_path: Path, ranks: int) -> None:
    layout = [f"--parallel.dp={ranks}"] if ranks else []
    (first, *_) = train(tmp_path, hub, *SMALL, *layout, "--steps=2", ranks=ranks)
    assert first.returncode == 0, first.stderr
    run = (tmp_path / "runs" / "latest").resolve()
    assert f'revision = "{OLD}"' in (run / "run.toml").read_text()
    hub.commits |= {"main": NEW, NEW: NEW}  # somebody has pushed
    (more, *_) = train(tmp_path, hub, f"--resume={run}", "--steps=4", ranks=ranks)
    assert more.returncode == 0, more.stderr
    assert (tmp_path / "asked").read_text().split() == [OLD] * 2 * (ranks or 1)  # each rank of both runs
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4]
    if ranks:
        return
    del hub.commits[OLD]  # somebody has rewritten history
    before = sorted(str(p) for p in run.rglob("*"))
    (gone,) = train(tmp_path, hub, f"--resume={run}", "--steps=6")
    assert gone.returncode == 2
    assert gone.stderr.startswith("error[REVISION]: the dataset no longer has this revision")
    assert gone.stderr.count("\n") == 1 and f"found {OLD}" in gone.stderr
    assert sorted(str(p) for p in run.rglob("*")) == before
    (other,) = train(tmp_path, hub, f"--resume={run}", "--steps=6", "--data.revision=auto", "--data.allow_change=true")
    assert other.returncode == 0, other.stderr
    assert f'revision = "{NEW}"' in (run / "run.toml").read_text()
