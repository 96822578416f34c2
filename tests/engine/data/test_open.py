from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from penteract.config.run import Data as RunData
from penteract.engine.data import Samples, open_samples, open_tokenizer, write_tokens
from penteract.engine.data.open import LARGE
from penteract.errors import BadInput, CorruptData

BYTES = open_tokenizer("bytes")


@dataclass(frozen=True)
class Data:
    source: str | tuple[str, ...]
    validation_fraction: float = 0.1
    pack_documents: bool = True
    revision: str = "auto"


def documents(path: Path, count: int) -> Data:
    path.write_text("".join(json.dumps({"text": f"<{i}>" + "ab" * (i % 17)}) + "\n" for i in range(count)))
    return Data(str(path))


def lines(data: Data) -> list[str]:
    assert isinstance(data.source, str)
    return Path(data.source).read_text().splitlines()


def seen(samples: Samples) -> list[int]:
    return sorted(int(t) for i in range(len(samples)) for t in samples.sample(i).tokens)


def test_no_document_is_on_both_sides(tmp_path: Path) -> None:
    data = documents(tmp_path / "a.jsonl", 400)
    stream = np.concatenate([np.append(BYTES.encode(json.loads(row)["text"]), 256) for row in lines(data)])
    train, validation = open_samples(data, BYTES, 1, seed=0)  # windows of one token: all but each side's last are seen
    border = len(train) + 1
    assert stream[border - 1] == 256
    assert abs((len(stream) - border) / len(stream) - 0.1) < 0.06
    assert seen(train) == sorted(stream[: border - 1].tolist())
    assert seen(validation) == sorted(stream[border:-1].tolist())


def test_builtin_gives_both_parts_and_the_same_ones_again() -> None:
    once, again = (open_samples(RunData(validation_fraction=0.02), BYTES, 128, seed=1) for _ in range(2))
    for a, b in zip(once, again, strict=True):
        assert len(a) == len(b) > 100
        assert a.sample(17).tokens.tolist() == b.sample(17).tokens.tolist()
    assert 0.01 < len(once[1]) / len(once[0]) < 0.03


def test_validation_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    data = documents(tmp_path / "a.jsonl", 400)
    parts = [open_samples(data, BYTES, 16, seed=s) for s in (1, 2)]
    order = [[p.sample(i).tokens.tolist() for i in range(len(p))] for pair in parts for p in pair]
    assert order[1] == order[3] and order[0] != order[2] and sorted(order[0]) == sorted(order[2])


def test_large_text_is_tokenised_once_and_read_the_same(tmp_path: Path) -> None:
    path, cache = tmp_path / "big.txt", tmp_path / "cache"
    path.write_bytes(b"0123456789abcde\n" * (LARGE // 16))
    plain = open_samples(Data(str(path)), BYTES, 64, seed=0)
    kept = open_samples(Data(str(path)), BYTES, 64, seed=0, cache=cache)
    assert {p.suffix for p in cache.iterdir()} == {".bin", ".json"}
    before = {p.name: p.stat().st_mtime_ns for p in cache.iterdir()}
    again = open_samples(Data(str(path)), BYTES, 64, seed=0, cache=cache)
    assert {p.name: p.stat().st_mtime_ns for p in cache.iterdir()} == before
    for side in (0, 1):
        assert len(plain[side]) == len(kept[side]) == len(again[side])
        rows = [s[side].sample(5).tokens.tolist() for s in (plain, kept, again)]
        assert rows[0] == rows[1] == rows[2]


def test_token_files_are_read_in_place(tmp_path: Path) -> None:
    ids = np.arange(100, dtype=np.uint16)
    write_tokens(tmp_path / "a.bin", [ids], BYTES)
    train, validation = open_samples(Data(str(tmp_path), 0, pack_documents=False), BYTES, 9, seed=0)
    assert sorted(int(t) for i in range(11) for t in train.sample(i).targets) == list(range(1, 100))
    assert (len(train), len(validation)) == (11, 0)


def test_ids_outside_the_vocabulary_are_found_even_unannounced(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(np.array([1, 2, 999, 3], np.uint16).tobytes())
    (tmp_path / "a.bin.json").write_text('{"dtype": "uint16"}')
    train, _ = open_samples(Data(str(tmp_path), 0), BYTES, 3, seed=0)
    with pytest.raises(CorruptData, match=r"found 999 / allowed 0\.\.256"):
        train.sample(0)


def test_too_little_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.touch()
    with pytest.raises(BadInput, match=r"EMPTY.*holds no text"):
        open_samples(Data(str(path)), BYTES, 8, seed=0)
    path.write_text("abcdefgh")
    with pytest.raises(BadInput, match=r"train part of the data is shorter .* allowed at least 10 tokens"):
        open_samples(Data(str(path), 0), BYTES, 9, seed=0)
    path.write_text("abcdefgh" * 10)
    with pytest.raises(BadInput, match="validation part"):
        open_samples(Data(str(path), 0.01), BYTES, 8, seed=0)
    assert len(open_samples(Data(str(path), 0), BYTES, 8, seed=0)[0]) == 10
