"""Two hundred ways to be wrong: each ends with exit code 2 and lines that say so, before anything starts."""

import contextlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from draws import draws
from penteract.cli import main
from penteract.config.files.keys import keys
from penteract.config.files.read import read_overrides
from penteract.config.layout import CP_METHODS
from penteract.config.resolve.resolved_run import resolve
from penteract.schedule.registry import SCHEDULES

QUIET = draws(24)

DEGREE = st.integers(1, 40) | st.sampled_from([64, 1000, 2**14, 2**20])
LAYOUT = {
    **{f"parallel.{axis}": DEGREE for axis in ("dp", "tp", "pp", "cp", "ep", "vpp", "expert_tp")},
    "parallel.vpp": st.integers(1, 40) | st.sampled_from([64, 1000]),
    "parallel.schedule": st.sampled_from(tuple(SCHEDULES)),
    "parallel.cp_method": st.sampled_from(CP_METHODS),
    "batch.micro_batch_size": DEGREE,
    "batch.global_batch_size": DEGREE,
    "batch.sequence_length": st.integers(1, 600),
}
LAYOUTS = st.fixed_dictionaries({}, optional=LAYOUT)

WRONG = st.sampled_from(
    ["0", "-1", "1.5", "nan", "inf", "true", "''", "'x'", "[]", "[1, 'a']", "{}", "1979-05-27", "9" * 30,
     "'\\u0000'", "[[[]]]", '"""\n"""']
)  # fmt: skip
JUNK_KEYS = st.sampled_from(["tpp", "train", "Parallel", "", "a b", "\\u00e9", "x" * 300])
ASSIGNMENTS = st.tuples(st.sampled_from(sorted(keys())), WRONG).map(lambda kv: f"{kv[0]} = {kv[1]}")
TYPOS = st.tuples(st.sampled_from(sorted(keys())), st.integers(0, 3)).map(lambda kn: f"{kn[0]}{'xyzq'[kn[1]]} = 1")
JUNK = st.tuples(st.sampled_from(["parallel", "", "zzz"]), JUNK_KEYS).map(lambda sk: f'{sk[0] or "_"}."{sk[1]}" = 1')
WORDS = st.sampled_from(
    ["--tp", "3", "--steps", "--preset", "-x", "--help=3", "--json=maybe", "--no-json", "--parallel.tp", "--.tp=1",
     "a.toml", "--draw", "--steps=1e9", "\n", "--log-level"]
)  # fmt: skip
TEXTS = st.text(max_size=40).filter(lambda text: text.strip() and "#" not in text)


def run(words: Sequence[str]) -> tuple[int, list[str]]:
    """Exit code and the lines on stderr."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        code = main(list(words))
    return code, err.getvalue().splitlines()


def refused(words: Sequence[str], started: list[Any]) -> list[str]:
    code, lines = run(words)
    assert code == 2, lines
    assert 1 <= len(lines) <= 3
    assert all(re.match(r"error\[[A-Z]+\]: \S", line) and len(line) < 500 for line in lines), lines
    assert "Traceback" not in "".join(lines)
    assert not started
    return lines


@QUIET
@given(chosen=LAYOUTS, name=st.sampled_from(["tiny", "tiny-moe", "gpt2"]), world=st.sampled_from([None, 1, 4, 6, 64]))
@example(chosen={"parallel.tp": 3}, name="tiny", world=4)
@example(chosen={"parallel.schedule": "interleaved", "parallel.pp": 4, "parallel.vpp": 2}, name="tiny", world=None)
@example(chosen={"parallel.dp": 2**20}, name="tiny", world=None)
@example(chosen={"batch.global_batch_size": 2**20}, name="tiny", world=None)
@example(chosen={"batch.global_batch_size": 2**20, "batch.micro_batch_size": 1}, name="tiny-moe", world=4)
@example(chosen={"batch.micro_batch_size": 2**20, "batch.global_batch_size": 2**20}, name="tiny", world=None)
def test_a_broken_layout_names_one_that_is_legal(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Any], name: str, world: int | None
) -> None:
    for key, value in {
        "RANK": 0,
        "WORLD_SIZE": world,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
    }.items():
        monkeypatch.delenv(key, raising=False) if world is None else monkeypatch.setenv(key, str(value))
    started.clear()
    words = ["train", "--preset", name, *(f"{key}={value}" for key, value in chosen.items())]
    code, _ = run(words)
    if code == 0:  # legal by luck
        assert len(started) == 1
        return
    lines = refused(words, started)
    assert lines[0].startswith("error[LAYOUT]")
    fix = lines[0].split(" · fix: ")[1].split()
    assert read_overrides(fix)
    code, lines = run([*words, *fix])
    assert (code, lines) == (0, [])


@QUIET
@given(text=ASSIGNMENTS | TYPOS | JUNK | TEXTS, as_flag=st.booleans())
@example(text="parallel.tp = '\\u0000'", as_flag=False)
@example(text="[train]\nsteps = 3", as_flag=False)
def test_a_broken_file_or_flag_is_told_in_lines(started: list[Any], tmp_path: Path, text: str, as_flag: bool) -> None:
    started.clear()
    path = tmp_path / "broken.toml"
    path.write_text(text, encoding="utf-8", errors="replace")
    key, equals, value = text.partition(" = ")
    words = ["train", f"--{key}={value}"] if as_flag and equals else ["train", str(path)]
    assume(not _is_fine(words))
    refused(words, started)


def _is_fine(words: list[str]) -> bool:
    """Some of what is drawn is no fault: 0 is a seed, and a text is a name."""
    try:
        resolve(words[1]) if not words[1].startswith("--") else resolve(overrides=words[1:])
    except Exception:
        return False
    return True


@QUIET
@given(words=st.lists(WORDS, min_size=1, max_size=5))
def test_a_broken_command_line_is_told_in_lines(started: list[Any], words: list[str]) -> None:
    started.clear()
    assume(run(["train", *words])[0] != 0)
    started.clear()
    refused(["train", *words], started)
