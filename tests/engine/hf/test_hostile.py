"""Folders that are damaged, or made to harm: one line, an exit code, at once, and nothing written."""

from __future__ import annotations

import json
import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.hf import folders
from penteract.cli import main
from penteract.engine.hf.headers import held_tensors
from penteract.errors import PenteractError

Harm = Callable[[Path], object]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Exit code and stderr of a command that must be quick, by its own time: other tests may run beside it."""
    begun = time.process_time()
    code = main([str(w) for w in words])
    assert time.process_time() - begun < 1
    return code, capsys.readouterr().err


def edited(change: Callable[[dict[str, Any]], object], file: str = INDEX) -> Harm:
    """A JSON file of the folder, changed."""

    def act(at: Path) -> None:
        content = json.loads((at / file).read_text())
        change(content)
        (at / file).write_text(json.dumps(content))

    return act


def pointing(name: str) -> Harm:
    return edited(lambda index: index["weight_map"].update({"model.norm.weight": name}))


def header(text: bytes, length: int | None = None) -> Harm:
    """A file of this header alone."""
    return lambda at: (at / SINGLE).write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text)


def tensor(**row: Any) -> Harm:
    return header(json.dumps({"model.norm.weight": row}).encode())


def cut(at: Path) -> None:
    data = (at / SINGLE).read_bytes()
    (at / SINGLE).write_bytes(data[: len(data) // 2])


def without(name: str) -> Harm:
    return lambda at: (at / name).unlink()


def pickled(at: Path) -> None:
    (at / SINGLE).unlink()
    (at / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


ONE: list[tuple[str, Harm, int, str]] = [
    ("cut", cut, 65, "WEIGHTS.*damaged.*cut short"),
    ("empty", lambda at: (at / SINGLE).write_bytes(b""), 65, "damaged.*header does not fit"),
    ("endless", header(b"{}", 2**63), 65, "damaged.*header does not fit"),
    ("no json", header(b"\xff" * 64), 65, "damaged"),
    ("a list", header(b"[]"), 65, "damaged.*no safetensors header"),
    ("nested", header(b"[" * 100_000), 65, "damaged"),
    ("outside", tensor(dtype="F32", shape=[32], data_offsets=[2**40, 2**40 + 128]), 65, "outside the file"),
    ("negative", tensor(dtype="F32", shape=[-32], data_offsets=[0, 0]), 65, "damaged"),
    ("fractions", tensor(dtype="F32", shape=[3.5], data_offsets=[0, 14]), 65, "damaged"),
    ("no type", tensor(dtype="Q7", shape=[0], data_offsets=[0, 0]), 65, "a tensor of type Q7"),
    ("not its size", tensor(dtype="F32", shape=[7], data_offsets=[0, 0]), 65, "not those of its shape"),
    ("others", tensor(dtype="F32", shape=[0], data_offsets=[0, 0]), 2, "20 tensors are missing.*model.embed_tokens"),
    ("nothing", without(SINGLE), 2, "no weights here.*model.safetensors"),
    ("pickle", pickled, 2, "pickled weights are never opened.*pytorch_model.bin.*save_pretrained"),
    ("config", without("config.json"), 2, "no weights here"),
    ("size", edited(lambda c: c.update(hidden_size=64), "config.json"), 2, r"another shape.*\[272, 32\].*\[272, 64\]"),
    ("layers", edited(lambda c: c.update(num_hidden_layers=3), "config.json"), 2, "9 tensors are missing.*layers.2"),
    ("fewer", edited(lambda c: c.update(num_hidden_layers=1), "config.json"), 2, "9 tensors are not of this model"),
    ("quantised", edited(lambda c: c.update(quantization_config={"bits": 4}), "config.json"), 2,
     "UNSUPPORTED.*quantised"),
]  # fmt: skip
SEVERAL: list[tuple[str, Harm, int, str]] = [
    ("outside", pointing("../../secret.safetensors"), 65, "not the name of a file in the same folder"),
    ("absolute", pointing("/etc/passwd"), 65, "not the name of a file in the same folder"),
    ("number", edited(lambda i: i["weight_map"].update({"model.norm.weight": 3})), 65, "not the name of a file"),
    ("absent", without("model-00002-of-00003.safetensors"), 65, "cannot be read.*00002"),
    ("elsewhere", pointing("model-00001-of-00003.safetensors"), 65, "no model.norm.weight, which"),
    ("no map", edited(lambda i: i.pop("weight_map")), 65, "damaged"),
    ("empty map", edited(lambda i: i.update(weight_map={})), 65, "no weight_map"),
]


@pytest.mark.parametrize(
    ("files", "harm", "code", "line"),
    [pytest.param(n, *row[1:], id=f"{row[0]}-{n}") for n, rows in ((1, ONE), (3, SEVERAL)) for row in rows],
)
def test_one_line(files: int, harm: Harm, code: int, line: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    at = folders.write(tmp_path / "hf", files=files)
    harm(at)
    for words in (["train", "--init", at], ["convert", at, tmp_path / "to"]):
        found, err = told(capsys, *words)
        assert found == code, err
        assert err.count("\n") == 1 and len(err) < 700
        assert err.startswith("error[") and re.search(line, err), err
    assert {p.name for p in tmp_path.iterdir()} <= {"hf", "runs"}


@settings(max_examples=150)
@given(data=st.data())
def test_any_bytes_of_a_header_are_tensors_or_one_line(data: st.DataObject, tmp_path_factory: Any) -> None:
    at = tmp_path_factory.mktemp("any")
    atoms = st.none() | st.integers() | st.text(max_size=4) | st.floats() | st.sampled_from(["F32", 2**70, True])
    row = st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), atoms | st.lists(atoms, max_size=3))
    text = data.draw(st.binary(max_size=60) | st.dictionaries(st.text(max_size=3), row | atoms).map(_json))
    (at / SINGLE).write_bytes(data.draw(st.sampled_from([len(text), 2**40, 3])).to_bytes(8, "little") + text)
    try:
        assert isinstance(held_tensors(at), dict)
    except PenteractError as error:
        assert error.exit_code == 65 and "\n" not in str(error)


def _json(tree: object) -> bytes:
    return json.dumps(tree).encode()
