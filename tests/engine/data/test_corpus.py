from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.engine.data import corpus as corpora
from penteract.engine.data.corpus import BUILTIN_LIMIT, MAX_PART, StreamedCorpus, TextCorpus, TextPart, find_corpus
from penteract.errors import BadInput, CorruptData


def text_parts(source: str | tuple[str, ...]) -> list[TextPart]:
    corpus = find_corpus(source)
    assert isinstance(corpus, TextCorpus)
    return list(corpus.parts())


def test_builtin_is_python_of_some_megabytes_and_always_the_same() -> None:
    corpus = find_corpus("builtin")
    corpora._builtin.cache_clear()
    assert isinstance(corpus, TextCorpus) and corpus == find_corpus("builtin")
    assert BUILTIN_LIMIT / 2 < corpus.size() <= BUILTIN_LIMIT
    parts = {p for f in corpus.files for p in f.parts[-3:-1]}
    assert not parts & {"site-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
    assert sum(len(p.text.encode()) for p in corpus.parts()) == corpus.size()


def test_a_text_file_is_a_document_and_a_line_of_jsonl_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("héllo\r\n".encode())
    (tmp_path / "empty.txt").touch()
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n\n{"text": "", "id": 1}\n{"id": 2, "text": "two\\n"}')
    (tmp_path / "README.md").write_text("not data")
    assert sorted(text_parts(str(tmp_path))) == [("héllo\r\n", True), ("one", True), ("two\n", True)]
    assert text_parts((str(tmp_path / "a.txt"), str(tmp_path / "a.txt"))) == [("héllo\r\n", True)] * 2


def test_a_folder_is_read_in_one_order_whatever_the_disk_says(tmp_path: Path) -> None:
    names = [f"{i}.txt" for i in range(20)]
    for folder, order in (("x", names), ("y", names[::-1])):
        (tmp_path / folder).mkdir()
        for name in order:
            (tmp_path / folder / name).write_text(name)
    assert text_parts(str(tmp_path / "x")) == text_parts(str(tmp_path / "y"))
    assert [p.text for p in text_parts(str(tmp_path / "x"))] != sorted(names)


@settings(max_examples=5)
@given(st.sampled_from(["x", "é", "𝄞"]), st.sampled_from([40, MAX_PART * 3]), st.integers(0, 3))
def test_a_long_document_comes_in_parts_and_nothing_is_lost(
    tmp_path_factory: pytest.TempPathFactory, letter: str, line: int, shift: int
) -> None:
    text = "a" * shift + ((letter * line + "\n") * (MAX_PART * 4 // line + 1))
    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text(text)
    found = text_parts(str(path))
    assert "".join(p.text for p in found) == text
    assert [p.ends_document for p in found] == [False] * (len(found) - 1) + [True]
    assert len(found) > 1 and all(p.text for p in found)
    if line == 40:
        assert all(p.text.endswith("\n") for p in found)


@pytest.mark.parametrize("at", [0, 10, MAX_PART * 2 - 1, MAX_PART * 2 + 5])
def test_bytes_that_are_no_text_are_found_where_they_are(tmp_path: Path, at: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * at + b"\xff" + b"y" * 10)
    with pytest.raises(CorruptData, match=rf"not UTF-8 · .*, byte {at} · found 0xff"):
        text_parts(str(path))
    path.write_bytes(b"x" * at + "é".encode()[:1])
    with pytest.raises(CorruptData, match=rf"byte {at} · found 0xc3"):
        text_parts(str(path))


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        (b'{"text": "cut', CorruptData, "not a line of JSON"),
        (b'{"text": "\xff"}', CorruptData, "not UTF-8"),
        (rb'{"text": "\ud800"}', CorruptData, "surrogate"),
        (b'{"kernel": "x"}', BadInput, 'no field "text".*found kernel'),
        (b'{"text": 3}', BadInput, 'no field "text"'),
        (b'["x"]', BadInput, "found list"),
    ],
)
def test_bad_lines_are_named_by_number(tmp_path: Path, line: bytes, kind: type[Exception], message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(kind, match=message) as e:
        text_parts(str(path))
    assert "a.jsonl:3" in str(e.value) or "line 3" in str(e.value)


def test_sources_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "a.txt").write_text("x")
    (tmp_path / "both" / "a.bin").touch()
    for source, message in [
        (str(tmp_path / "nowhere"), "no such data"),
        (str(tmp_path / "a.csv"), "not a kind of data file"),
        (str(tmp_path / "both"), "not both · .* found .bin .txt"),
        ("hf:", "needs the name"),
        (("hf:a", "builtin"), "streamed alone"),
        ((), "no data is named"),
    ]:
        with pytest.raises(BadInput, match=message) as e:
            find_corpus(source)
        assert "fix: " in str(e.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="no data files in this folder"):
        find_corpus(str(tmp_path / "empty"))


def test_datasets_have_names_and_configs() -> None:
    assert find_corpus("hf:a/b:c") == StreamedCorpus("a/b", "c")
    assert find_corpus(("hf:a/b",)) == StreamedCorpus("a/b", "")


def test_the_digest_follows_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    digests = set[str]()
    for i, text in enumerate(["one", "three", "three"]):
        path.write_text(json.dumps({"text": text}))
        os.utime(path, (i, i))
        corpus = find_corpus(str(path))
        assert isinstance(corpus, TextCorpus)
        assert corpus.digest() == corpus.digest()
        digests.add(corpus.digest())
    assert len(digests) == 3
