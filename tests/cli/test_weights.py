"""`train --init` up to the engine, and `convert`: what is read off the weights, and what is refused."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.hf import folders
from penteract.config.hf import model_from_hf
from penteract.config.resolve.resolved_run import model_at, resolve
from penteract.config.resolve.write_run_file import to_toml

Tell = Callable[..., Any]
Calls = list[dict[str, Any]]


def a_run(folder: Path, *overrides: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(to_toml(resolve(None, None, overrides)))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "latest").touch()
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return folders.write(tmp_path / "llama")


def test_the_model_is_the_weights_own(tell: Tell, started: Calls, llama: Path) -> None:
    assert tell("train", "--init", llama, "--parallel.tp", "2").code == 0
    (call,) = started
    assert call["init"] == llama
    assert call["resolved"].run.model == model_from_hf(llama)
    assert call["resolved"].origins["model.layers"] == str(llama)
    assert call["resolved"].run.tokenizer == "bytes"
    assert call["resolved"].run.train.steps == resolve(None, "", [f"model.config={llama}"]).run.train.steps


def test_a_table_may_be_padded_and_the_tokenizer_comes_along(tell: Tell, started: Calls, llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{}")
    assert tell("train", "--init", llama, "--model.vocab_size", "288").code == 0
    run = started[0]["resolved"].run
    assert run.model == replace(model_from_hf(llama), vocab_size=288)
    assert run.tokenizer == str(llama / "tokenizer.json")
    assert tell("train", "--init", llama, "--tokenizer.source", "bytes").code == 0
    assert started[1]["resolved"].run.tokenizer == "bytes"


def rates(call: dict[str, Any]) -> tuple[float, int, str, str]:
    resolved = call["resolved"]
    run, of = resolved.run, resolved.origins
    return (
        run.optimizer.learning_rate, run.lr_schedule.warmup_steps,
        of["optimizer.learning_rate"], of["learning_rate.warmup_steps"],
    )  # fmt: skip


def test_weights_go_on_at_a_tenth_of_a_first_trainings_rate(tell: Tell, started: Calls, llama: Path) -> None:
    told = tell("train", "--init", "llama")
    assert told.out == (
        "Chosen to go on from llama: learning rate 4e-05, a tenth of a first training's usual peak, after 100 steps of "
        "warmup\n"
    )
    why = "chosen to go on from llama"
    assert rates(started[-1]) == (4e-5, 100, why, why)
    assert "after 2 steps of warmup" in tell("train", "--init", "llama", "--steps", "20").out
    assert "after 1 step of warmup" in tell("train", "--init", "llama", "--learning_rate.decay_end", "3").out
    assert not tell("train", "--init", "llama", "--json").out


def test_what_is_given_stays_as_it_is_where_weights_go_on(
    tell: Tell, started: Calls, llama: Path, tmp_path: Path
) -> None:
    told = tell("train", "--init", "llama", "--optimizer.learning_rate", "1e-3")
    assert told.out == "Chosen to go on from llama: 100 steps of warmup\n"
    assert rates(started[-1]) == (1e-3, 100, "--optimizer.learning_rate", "chosen to go on from llama")
    (tmp_path / "mine.toml").write_text("[optimizer]\nlearning_rate = 1e-4\n[learning_rate]\nwarmup_steps = 0\n")
    assert tell("train", "mine.toml", "--init", "llama").out == ""
    assert rates(started[-1]) == (1e-4, 0, "mine.toml:2", "mine.toml:4")
    (tmp_path / "mine.toml").write_text("[optimizer]\nlearning_rate = 4e-4\n[learning_rate]\nwarmup_steps = 0\n")
    assert tell("train", "mine.toml", "--init", "llama").out == (  # as `plan` writes it
        "note: learning rate 0.0004 (mine.toml:2) is high for weights that are trained already; "
        "--optimizer.learning_rate 4e-05 is a tenth of a first training's usual peak\n"
    )
    assert rates(started[-1])[0] == 4e-4


def test_a_runs_weights_go_on_at_a_tenth_of_its_own_rate(tell: Tell, started: Calls, tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "a", "optimizer.learning_rate=0.004")
    assert "learning rate 0.0004, a tenth of its run's peak, after" in tell("train", "--init", "latest").out
    # A preset decides for a first training, and a file that names one has not decided either.
    (tmp_path / "mine.toml").write_text('preset = "tiny"\n')
    for words in (("--preset", "tiny"), ("mine.toml",)):
        assert "learning rate 0.0004" in tell("train", *words, "--init", "latest").out
        assert started[-1]["resolved"].run.lr_schedule.warmup_steps == 4  # a tenth of tiny's steps


def test_a_line_names_what_differs_from_the_run_that_made_the_weights(
    tell: Tell, started: Calls, llama: Path, tmp_path: Path
) -> None:
    """It is not taken over, and a loss of other data or lengths is not comparable."""
    (tmp_path / "mine.txt").write_text("text")
    like = ("batch.sequence_length=128", "batch.global_batch_size=8")
    a_run(tmp_path / "runs" / "a", *like, "data.source=mine.txt")
    told = tell("train", "--init", "latest", *like, "data.source=mine.txt")
    assert told.code == 0 and "Unlike" not in told.out
    told = tell("train", "--init", "latest", "batch.global_batch_size=8", "--batch.sequence_length", "64",
                "--precision.dtype", "bf16", "--training.seed", "5")  # fmt: skip
    assert told.out.splitlines()[1:] == [
        "Unlike the run that made these weights: data builtin (there mine.txt), sequence length 64 (there 128), "
        "precision bf16 (there fp32)"
    ]
    assert "Unlike" not in tell("train", "--init", "llama").out  # a folder of Hugging Face tells no run


def test_converted_weights_have_no_rate_of_their_own(tell: Tell, started: Calls, llama: Path) -> None:
    assert tell("convert", llama, "ours").code == 0
    assert "4e-05, a tenth of a first training's" in tell("train", "--init", "ours").out


def test_a_run_and_one_of_its_steps(tell: Tell, started: Calls, tmp_path: Path) -> None:
    run = a_run(tmp_path / "runs" / "a", "model.layers=3", "training.steps=7")
    assert tell("train", "--init", "latest", "--steps", "2").code == 0
    assert started[0]["resolved"].run.model == model_at(run) == replace(resolve().run.model, layers=3)
    assert started[0]["init"].resolve() == run
    step = run / "checkpoints" / "step-00000007"
    step.mkdir()
    (step / "manifest.json").write_text("{}")
    assert tell("train", "--init", step).code == 0
    assert (started[1]["init"], started[1]["resolved"].run.model.layers) == (step, 3)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--preset", "tiny"], r"INIT.*model.layers · found 4 / allowed 2, as in"),
        (["--model.vocab_size", "264"], r"INIT.*model.vocab_size · found 264 / allowed >= 272"),
        (["--model.rope_theta", "5"], r"INIT.*model.rope_theta · found 5.0 / allowed 10000.0"),
        (["--model.moe.experts=4", "model.moe.top_k=2", "model.moe.ffn_size=8"],
         "INIT.*model.moe · found experts / allowed none, as in .* · fix: leave out --preset"),
        (["--resume", "llama"], r"USAGE.*a resumed run has its own weights"),
    ],
)  # fmt: skip
def test_another_model_is_named_by_field(tell: Tell, started: Calls, llama: Path, words: list[str], line: str) -> None:
    told = tell("train", "--init", "llama", *words)
    assert told.code == 2 and not started
    assert told.err.count("\n") == 1
    assert re.search(line, told.err), told.err


def test_what_is_nowhere_or_nothing(tell: Tell, started: Calls, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, line in (("none", "WEIGHTS]: no such folder · --init"), ("empty", "WEIGHTS]: no weights here · --init"),
                       ("latest", "RUN]: there is no run yet"), ("\0", "WEIGHTS]: no such folder")):  # fmt: skip
        told = tell("train", "--init", name)
        assert told.code == 2 and line in told.err
    run = a_run(tmp_path / "runs" / "a")
    assert "found --resume and --init" in tell("train", "--init", run, "--resume", run).err
    assert not started


def test_the_weights_that_were_probably_meant(tell: Tell, started: Calls, llama: Path, tmp_path: Path) -> None:
    (run := a_run(tmp_path / "runs" / "a-run-of-today") / "checkpoints" / "step-00000040").mkdir()
    (run / "manifest.json").touch()
    (tmp_path / "lama.txt").touch()
    for name, fix in (
        ("lama", "--init llama"), ("./llama-", "--init llama"), ("a-run-of-tody", "--init runs/a-run-of-today"),
        ("runs/a-run-of-today/checkpoints/step-40", "--init runs/a-run-of-today/checkpoints/step-00000040"),
        ("nothing-like-it", "check the path"), ("runs", "check the path"),
        ("Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B, then --init Qwen3-0.6B"),
    ):  # fmt: skip
        told = tell("train", "--init", name)
        assert told.code == 2 and told.err.endswith(f" · fix: {fix}\n"), told.err
        for taken in ("a Hugging Face folder", "a run's folder", "a step in its checkpoints", "latest"):
            assert taken in told.err
    assert not started


def test_in_out_and_what_is_asked_of_either(tell: Tell, started: Calls, llama: Path, tmp_path: Path) -> None:
    told = tell("convert", llama, "ours", "--json")
    assert told.code == 0, told.err
    assert json.loads(told.out) == {
        "folder": "ours", "kind": "penteract", "tensors": 21, "parameters": 32_928, "bytes": 4 * 32_928, "files": 1,
        "dtype": "fp32",
    }  # fmt: skip
    assert model_at(tmp_path / "ours") == model_from_hf(llama)
    told = tell("convert", "ours", "hf")
    assert told.code == 0, told.err
    assert told.out == (
        "hf: llama, 32.9k parameters in 21 tensors, 64.31 KiB of bf16 in 1 file\n"
        "no tokenizer written: the run used bytes\n"
    )
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["torch_dtype"], config["eos_token_id"]) == ("bfloat16", None)
    assert tell("train", "--init", "ours").code == 0
    told = tell("train", "--resume", "ours")
    assert (told.code, "fix: penteract train --init ours" in told.err) == (2, True)
    assert tell("convert", llama, "small", "--shard-gib", "1e-4").code == 0
    assert len(list((tmp_path / "small" / "checkpoints" / "step-00000000").glob("rank-*.safetensors"))) == 2


def test_fewer_rows_where_a_table_was_padded(tell: Tell, llama: Path, tmp_path: Path) -> None:
    assert tell("convert", llama, "ours").code == 0
    assert tell("convert", "ours", "hf", "--vocab-size", "270").code == 0
    assert model_from_hf(tmp_path / "hf").vocab_size == 270
    (tmp_path / "ours" / "init.json").write_text('{"from": "x", "vocab_size": "260"}')
    assert tell("convert", "ours", "known").code == 0
    assert model_from_hf(tmp_path / "known").vocab_size == 260


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["llama", "llama"], "FILE]: it exists already"),
        (["none", "to"], "WEIGHTS]: no such folder · convert"),
        (["llama", "to", "--shard-gib", "0"], "VALUE]: not a file size"),
        (["llama", "to", "--vocab-size", "-1"], "VALUE]: not a number of rows"),
        (["llama", "to", "--dtype", "int3"], "USAGE]"),
        (["llama"], "USAGE]"),
        (["llama", "to", "--model.layers", "3"], "USAGE]: takes no values of a run"),
    ],
)
def test_refusals(tell: Tell, llama: Path, tmp_path: Path, words: list[str], line: str) -> None:
    told = tell("convert", *words)
    assert told.code == 2 and line in told.err, told.err
    assert not (tmp_path / "to").exists()


def test_what_fails_half_way_leaves_nothing(tell: Tell, llama: Path, tmp_path: Path, monkeypatch: Any) -> None:
    assert tell("convert", llama, "ours").code == 0
    before = {p.name for p in tmp_path.iterdir()}

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penteract.engine.checkpoint.durable.write", full)
    for words in ((llama, "a"), ("ours", "b")):
        told = tell("convert", *words)
        assert told.code == 74 and "No space left" in told.err
    assert {p.name for p in tmp_path.iterdir()} == before


@pytest.mark.alone
def test_a_damaged_step_is_refused(tell: Tell, llama: Path, tmp_path: Path) -> None:
    assert tell("convert", llama, "ours").code == 0
    file = tmp_path / "ours" / "checkpoints" / "step-00000000" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    begun = time.process_time()
    told = tell("convert", "ours", "hf")
    assert told.code == 65 and "not the ones that were written" in told.err
    assert time.process_time() - begun < 1
    assert sorted(os.listdir(tmp_path)) == ["llama", "ours"]
