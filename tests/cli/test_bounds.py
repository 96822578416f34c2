"""What no machine can do, no arithmetic can bear, or no end can be waited for: refused in one line before anything is
made, in less than a second of the processor."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.attempts import attempt, no_ranks
from outside import penteract
from penteract.config.catalog.hardware import FOLDER
from penteract.config.files.parse_toml import parse_toml

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 512, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
}  # fmt: skip
MANY = str(10**8)


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with no_ranks():
        yield


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("optimizer.betas", "1.0,0.9", "found [1.0, 0.9] / allowed a number, 0 to 0.999999"),
        ("optimizer.betas", "[0.9, 1.0]", "found [0.9, 1.0] / allowed a number, 0 to 0.999999"),
        ("optimizer.muon_momentum", "1", "found 1 / allowed a number, 0 to 0.999999"),
        ("optimizer.epsilon", "0", "found 0 / allowed a number, 1e-20 to 1"),
        ("model.norm_epsilon", "0", "found 0 / allowed a number, 1e-20 to 1"),
        ("model.rope_theta", "1", "found 1 / allowed a number, 2 to 1e+15"),
        ("training.validation_batches", "100000000000", "found 100000000000 / allowed a whole number, 1 to 1000000"),
        ("training.sample_tokens", "100000000000", "allowed a whole number, 0 to 1000000"),
        ("model.layers", "10000", "found 10000 / allowed a whole number, 1 to 1024"),
        ("batch.global_batch_size", MANY, f"found {MANY} / allowed a whole number, 1 to 2^20"),
        ("batch.micro_batch_size", MANY, f"found {MANY} / allowed"),
        ("batch.sequence_length", MANY, f"found {MANY} / allowed a whole number, 1 to 2^24"),
        ("parallel.dp", str(2**48), "allowed a whole number, 1 to 2^20 or auto"),
        ("batch.global_batch_size", str(2**20), "fix: --batch.global_batch_size"),
        ("precision.loss_scale", "1e-9", "allowed"),
    ],
)
def test_a_value_of_a_run(tmp_path: Path, key: str, value: str, line: str) -> None:
    attempt(["train", f"--{key}", value], tmp_path).refused(key, line)
    file = tmp_path / "run.toml"
    section, _, name = key.rpartition(".")
    file.write_text(f"[{section}]\n{name} = {value if ',' not in value or '[' in value else f'[{value}]'}\n")
    if section != "model":  # a file with a part of a model has to have it whole
        attempt(["train", file], tmp_path).refused(key)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"rope_scaling": {"a": 1}}, 'no field of rope scaling "default" · config.json: rope_scaling · found a'),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "a": 1}}, 'no field of rope scaling "linear"'),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
         "high_freq_factor is not what it should be · config.json: rope_scaling · found 4"),
        ({"quantization_config": 3}, "found 3 / allowed {…}, which says how weights are quantised"),
        ({"quantization_config": []}, "found [] / allowed {…}"),
        ({"num_hidden_layers": 10_000}, "num_hidden_layers is not what it should be · config.json · found 10000"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"num_hidden_layers": 10**400}, "found a number of more than 40 digits"),
    ],
)  # fmt: skip
def test_a_field_of_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(LLAMA | change))
    for words in (["train", "--model.config", "config.json"], ["plan", "config.json", "--gpus", "8xH200"]):
        attempt(words, tmp_path).refused(line)


def harm(at: Path, kind: str) -> Path:
    """A path that no data can be read from without end, or at all."""
    if kind == "fifo":
        os.mkfifo(at)
    elif kind == "loop":
        at.symlink_to(at.name)
    elif kind == "device":
        at.symlink_to("/dev/zero")
    return at


READERS: list[tuple[str, Callable[[Path], list[object]]]] = [
    (".toml", lambda at: ["train", at]),
    (".json", lambda at: ["train", "--model.config", at]),
    (".json", lambda at: ["plan", at, "--gpus", "8xH200"]),
    (".toml", lambda at: ["plan", "gpt2", "--gpus", at]),
    (".txt", lambda at: ["train", "--data.source", at]),
    (".bin", lambda at: ["train", "--data.source", at]),
    (".json", lambda at: ["train", "--tokenizer.source", at]),
    ("", lambda at: ["train", "--init", at]),
    ("", lambda at: ["train", "--resume", at]),
    ("", lambda at: ["convert", at, at.with_name("to")]),
    ("", lambda at: ["checkpoints", at]),
]


@pytest.mark.parametrize("kind", ["missing", "fifo", "loop", "device"])
@pytest.mark.parametrize(("ending", "words"), READERS)
def test_a_path_that_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ending: str, words: Callable[[Path], list[object]]
) -> None:
    monkeypatch.chdir(tmp_path)
    at = harm(tmp_path / f"what{ending}", kind)
    ended = attempt(words(at), tmp_path).check((2,))
    assert ended.err.count("\n") == 1 and "fix: " in ended.err


@pytest.mark.parametrize("name", ["config.json", "run.toml", "model.safetensors", "tokenizer.json"])
def test_a_folder_of_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for words in (["train", "--init", folder], ["convert", folder, "to"], ["train", "--model.config", folder]):
        ended = attempt(words, tmp_path)
        if ended.code:  # a config alone is enough to train its model
            ended.check((2, 65))


@pytest.mark.parametrize(
    ("files", "code", "line"),
    [
        ({"a.txt": b""}, 2, "EMPTY"),
        ({"a.txt": b"short"}, 2, "TOO_SHORT"),
        ({"a.txt": b"\xff\xfe" * 4000}, 65, "not UTF-8"),
        ({"a.jsonl": b'{"text": 3}\n'}, 2, 'no field "text" that holds a string'),
        ({"a.jsonl": b"{\n"}, 65, "not a line of JSON"),
        ({"a.jsonl": b"[" * 100_000 + b"\n"}, 65, "not a line of JSON"),
        ({"a.jsonl": b"9" * 100_000 + b"\n"}, 65, "not a line of JSON"),
        ({"a.bin": bytes(8000)}, 2, ".bin.json that says how to read it"),
        ({"a.bin": bytes(7999), "a.bin.json": b'{"dtype": "uint16"}'}, 65, "the file's size"),
        ({"a.bin": b"\xff" * 8000, "a.bin.json": b'{"dtype": "uint16"}'}, 65, "outside the vocabulary"),
        ({"a.bin": bytes(8000), "a.bin.json": b'{"dtype": "int3"}'}, 2, "unknown dtype"),
        ({"a.bin": bytes(8000), "a.bin.json": b"[" * 100_000}, 65, "not JSON"),
        ({"a.bin": bytes(8000), "a.bin.json": b'{"dtype": "uint16", "end_of_document": 7}'}, 2, "another tokenizer"),
        ({"a.bin": bytes(8000), "a.bin.json": b'{"dtype": "uint16"}', "a.txt": b"text"}, 2, "text or tokens, not both"),
        ({"a.csv": b"1,2"}, 2, "no data files in this folder"),
    ],
)
def test_data_are_refused_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], code: int, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name, content in files.items():
        (tmp_path / "data" / name).write_bytes(content)
    ended = attempt(["train", "--data.source", "data"], tmp_path).check((code,))
    assert line in ended.err


def test_a_sound_run_makes_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = attempt(["train"], tmp_path)
    (made,) = (tmp_path / "runs").iterdir()  # `latest` leads to a run that trains, and here no rank starts
    assert ended.code == 0 and (made / "run.toml").is_file()


@pytest.mark.parametrize(
    "words",
    [
        ["--model.layers", "1024", "--batch.global_batch_size", "16384", "--batch.micro_batch_size", "1",
         "--parallel.pp", "4"],
        ["--preset", "tiny-moe", "--model.layers", "1024", "--batch.global_batch_size", "65536",
         "--batch.micro_batch_size", "1", "--parallel.ep", "4"],
    ],
)  # fmt: skip
def test_the_longest_step_is_priced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert attempt(["train", *words]).check((0, 2)).code in (0, 2)


DEEP = "a." * 100_000


@pytest.mark.parametrize("text", [DEEP, f"[{DEEP}", f"x = 1\n \t[[ {DEEP}", f"x = {{ b = 1, {DEEP}", '"a". ' * 50_000])
def test_a_key_of_many_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The parser's time grows with the square of the parts."""
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(text)
    for words in (["train", "a.toml"], ["plan", "gpt2", "--gpus", "a.toml"], ["bench", "a.toml"]):
        assert "a key of more than 64 parts" in attempt(words, tmp_path).check((2,)).err
    attempt(["train", f"--data.source={{{DEEP}=1}}"], tmp_path).check((2,))


def test_keys_of_few_parts_and_long_lines_are_read() -> None:
    """What is refused above is no longer list, float, text or key than runs have."""
    files = ", ".join(f'"data/part.{n}.v1.jsonl"' for n in range(500))
    text = f'a.b.c = 1\n[x."y.z"]\nfiles = [{files}]\nabout = "{"a.b, " * 500}"\nnumbers = [{"0.5, " * 500}]\n'
    assert parse_toml(text) == tomllib.loads(text)


def test_what_is_found_is_shown_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(json.dumps({"x" * 5_000: 1}))
    attempt(["train", "--data.source=a.jsonl"], tmp_path).check((2,))
    attempt(["plan", "gpt2", "--gpus", "8xH200", "--tokens", "x" * 5_000], tmp_path).check((2,))


@pytest.mark.parametrize(
    "words",
    [["train", "--model.config"], ["explore"], ["doctor"], ["bench"], ["bench", "status"], ["profile"],
     ["calibrate", "--out"], ["plan", "gpt2", "--gpus", "8xH200", "--out"], ["checkpoints"], ["train"]],
    ids=" ".join,
)  # fmt: skip
def test_a_path_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    attempt([*words, "x" * 5_000], tmp_path).check((2,))


def test_a_large_vocabulary_with_a_chunked_loss_is_priced_at_once(tmp_path: Path) -> None:
    words = ["train", "--preset", "llama-3.1-8b", f"--model.vocab_size={2**24}"]
    err = attempt(words, tmp_path).check((2,)).err
    assert "do not fit this host's free memory" in err and "penteract plan shows what a layout takes" in err


@pytest.mark.parametrize("words", [["train"], ["plan", "gpt2", "--gpus"], ["train", "--model.config"]])
def test_a_pipe_from_outside(tmp_path: Path, words: list[str]) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    ended = penteract(tmp_path, *words, "pipe.toml", limit=60.0)
    assert ended.refused and "a pipe, a socket or a device · pipe.toml" in ended.err, ended
    assert [path.name for path in tmp_path.iterdir()] == ["pipe.toml"]


def test_hardware_files_are_small(tmp_path: Path) -> None:
    text = (FOLDER / "8xh200.toml").read_text(encoding="utf-8")
    (tmp_path / "ours.toml").write_text(text + "# more\n" * 200_000)
    ended = attempt(["plan", "gpt2", "--gpus", tmp_path / "ours.toml"], tmp_path).check((2,))
    assert "too large to be a configuration" in ended.err
