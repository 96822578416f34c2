from __future__ import annotations

import json
from pathlib import Path

import pytest

from penteract.engine.session.outputs.metrics import MetricsWriter, read_metrics
from penteract.errors import Bug, DiskFailure


def written(path: Path, steps: int) -> None:
    with MetricsWriter(path) as metrics:
        for step in range(1, steps + 1):
            metrics.write({"step": step, "train/loss": 1 / step})


def steps(path: Path) -> list[object]:
    return [row["step"] for row in read_metrics(path)]


def test_rows_are_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    metrics = MetricsWriter(path)
    metrics.write({"step": 1, "train/loss": 2.5, "train/grad_norm": float("inf"), "val/loss": float("nan")})
    assert read_metrics(path) == [{"step": 1, "train/loss": 2.5, "train/grad_norm": None, "val/loss": None}]
    metrics.write({"step": 4})
    assert steps(path) == [1, 4]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 4]
    metrics.close()


@pytest.mark.parametrize("tail", [b'{"step": 4, "train/lo', b'{"step": 4}', b"\0\0\0\n", b"\n"])
def test_a_torn_last_line_is_ignored_and_then_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "m.jsonl"
    written(path, 3)
    with path.open("ab") as file:
        file.write(tail)
    assert steps(path) == [1, 2, 3]
    with MetricsWriter(path, resume_at=3) as metrics:
        metrics.write({"step": 4})
    assert steps(path) == [1, 2, 3, 4]


def test_resuming_cuts_off_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    written(path, 9)
    with MetricsWriter(path, resume_at=5) as metrics:
        assert steps(path) == [1, 2, 3, 4, 5]
        metrics.write({"step": 6, "tokens": 7})
    assert read_metrics(path)[-1] == {"step": 6, "tokens": 7}
    MetricsWriter(path).close()
    assert read_metrics(path) == []


BAD = [b'{"step": ', b"\0\0\0", b"[]", b'{"loss": 1}', b'{"step": "2"}', b'{"step": true}', b'{"step": -1}', b"\xff",
       b"[" * 100_000, b'{"step": ' + b"9" * 5000 + b"}"]  # fmt: skip


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_bad_line_costs_its_row_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture, line: bytes) -> None:
    path, aside = tmp_path / "m.jsonl", tmp_path / "m.bad.jsonl"
    content = b'{"step": 1}\n\n' + line + b'\n{"step": 3}\n' + line + b'\n{"step": 4}\n{"step": 5}\n' + line + b"\n"
    path.write_bytes(content)
    assert steps(path) == [1, 3, 4, 5]
    assert path.read_bytes() == content and not aside.exists()  # reading changes nothing
    (said,) = caplog.messages
    assert f"{path}: 2 lines are no rows of metrics (line 3: b'" in said and len(said) < 300
    caplog.clear()
    with MetricsWriter(path, resume_at=4) as metrics:
        assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n{"step": 4}\n'
        metrics.write({"step": 5})
    assert aside.read_bytes() == line + b"\n" + line + b"\n"
    (said,) = caplog.messages
    assert said.endswith("; set aside in m.bad.jsonl")
    caplog.clear()
    assert steps(path) == [1, 3, 4, 5]
    MetricsWriter(path, resume_at=5).close()
    assert caplog.messages == []  # said once


@pytest.mark.parametrize("row", [{"step": 3}, {"step": 2}, {"train/loss": 1.0}])
def test_steps_must_increase(tmp_path: Path, row: dict[str, float]) -> None:
    written(tmp_path / "m.jsonl", 3)
    with MetricsWriter(tmp_path / "m.jsonl", resume_at=3) as metrics, pytest.raises(Bug, match="must increase"):
        metrics.write(row)


def test_a_disk_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskFailure, match="could not write metrics"):
        MetricsWriter(tmp_path / "file" / "m.jsonl")
    if Path("/dev/full").exists():
        with MetricsWriter(Path("/dev/full")) as metrics, pytest.raises(DiskFailure, match="No space"):
            metrics.write({"step": 1})


def test_rows_of_one_that_was_ousted_do_not_count(tmp_path: Path) -> None:
    """It goes on writing until it saves; readers take what the later epoch trained."""
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path, epoch=1) as first:
        for step in range(1, 6):
            first.write({"step": step, "train/loss": 1.0})
        with MetricsWriter(path, resume_at=4, epoch=2) as second:
            for step in (5, 6):
                second.write({"step": step, "train/loss": 2.0})
                first.write({"step": step + 1, "train/loss": 9.0})
            first.write({"step": 8, "train/loss": 9.0})
    assert [(row["step"], row["train/loss"]) for row in read_metrics(path)] == [
        (1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0)
    ]  # fmt: skip
