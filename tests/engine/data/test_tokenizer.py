from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penteract.engine.data.tokenizer import ByteTokenizer, id_type, open_tokenizer
from penteract.errors import BadInput, CorruptData

END = 200


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = open_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.uint16 and tokenizer.end_of_document not in ids


def test_bytes_leave_the_end_of_a_document_out() -> None:
    assert ByteTokenizer().decode([104, 105, 256, 33]) == "hi!"
    with pytest.raises(BadInput, match=r"found 0\.\.257 / allowed 0\.\.256"):
        ByteTokenizer().decode([0, 257])


def test_file_round_trip_is_whole_whatever_the_file_says_of_length(tokenizer_file: Path) -> None:
    tokenizer = open_tokenizer(str(tokenizer_file.parent))
    text = "a document longer than four tokens,\nwhich is what the file would cut it to"
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.end_of_document]) == text
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (END + 1, END)


def test_quoting_a_special_token_does_not_end_the_document(tokenizer_file: Path) -> None:
    tokenizer = open_tokenizer(str(tokenizer_file))
    text = "see <|endoftext|> there"
    assert END not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_many_is_each(tokenizer_file: Path) -> None:
    tokenizer = open_tokenizer(str(tokenizer_file))
    for a, b in zip(tokenizer.encode_many(["abc", "", "z"]), ["abc", "", "z"], strict=True):
        assert a.tolist() == tokenizer.encode(b).tolist()


def test_without_an_end_of_document_the_fix_is_named(tokenizer_file: Path) -> None:
    content = json.loads(tokenizer_file.read_text())
    content["added_tokens"][0]["special"] = False
    tokenizer_file.write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"END_OF_DOCUMENT.*allowed <\|endoftext\|>.*fix: add one of these"):
        open_tokenizer(str(tokenizer_file))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such tokenizer · found nowhere"):
        open_tokenizer("nowhere")
    broken = tmp_path / "tokenizer.json"
    broken.write_text('{"version": "1.0", ')
    with pytest.raises(CorruptData, match=r"not a tokenizer\.json"):
        open_tokenizer(str(broken))


@pytest.mark.parametrize("name", ["bytes", "file"])
def test_half_a_surrogate_pair_is_an_error(name: str, tokenizer_file: Path) -> None:
    tokenizer = open_tokenizer("bytes" if name == "bytes" else str(tokenizer_file))
    with pytest.raises(CorruptData, match="surrogate"):
        tokenizer.encode("a\ud800")


def test_ids_are_as_narrow_as_the_vocabulary_allows() -> None:
    assert [id_type(n).itemsize for n in (257, 65_536, 65_537)] == [2, 2, 4]


def test_without_the_library_the_fix_is_named(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(BadInput, match=r'fix: pip install "penteract\[hf\]"'):
        open_tokenizer(str(tokenizer_file))
