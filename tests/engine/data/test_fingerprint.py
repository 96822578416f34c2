"""A resumed run goes on with the data it was trained on, wherever that lies now."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faults.test_saved_state import session
from listed_documents import ListedDocuments
from penteract.engine.data import fingerprint
from penteract.engine.data.fingerprint import of_tokens
from penteract.engine.data.pack import DocumentPacking
from penteract.engine.data.stream.stream_samples import BLOCK, StreamSamples
from penteract.engine.data.tokenizer import open_tokenizer
from penteract.errors import BadInput


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(0, 200), st.sampled_from([64, 10**6]))
def test_only_content_counts(sizes: list[int], flip: int, whole: int) -> None:
    """Neither the division among files nor the dtype; and any id that is digested."""
    ids = np.arange(sum(sizes), dtype="<u2")
    parts = np.split(ids, np.cumsum(sizes)[:-1]) if sizes else []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fingerprint, "WHOLE", whole)
        patched.setattr(fingerprint, "BLOCK", 4)
        first = of_tokens(parts)
        assert of_tokens([ids.astype("<u4")]) == first
        assert first["tokens"] == len(ids)
        if len(ids) and whole > 4 * len(ids):
            ids[flip % len(ids)] ^= 1
            assert of_tokens([ids]) != first
        assert of_tokens([np.arange(len(ids) + 1, dtype="<u2")]) != first


def text(folder: Path, name: str, word: str) -> Path:
    path = folder / name
    path.write_text(f"{word} of many, and another after it.\n" * 400)
    return path


def test_other_data_is_refused_and_a_copy_is_not(tmp_path: Path) -> None:
    first = text(tmp_path, "a.txt", "One")
    run = tmp_path / "run"
    run.mkdir()
    session(run, "--training.steps=2", f"--data.source={first}").go()
    copy = tmp_path / "elsewhere" / "b.txt"
    copy.parent.mkdir()
    shutil.copyfile(first, copy)
    session(run, "--training.steps=3", f"--data.source={copy}", resume=True)
    other = text(tmp_path, "c.txt", "Two")
    with pytest.raises(BadInput, match="the data is not what the run was trained on") as refused:
        session(run, "--training.steps=3", f"--data.source={other}", resume=True)
    assert refused.value.exit_code == 2 and "--data.allow_change true" in refused.value.fix
    session(run, "--training.steps=3", f"--data.source={other}", "--data.allow_change=true", resume=True).go()


def stream(words: list[str]) -> StreamSamples:
    source = ListedDocuments(len(words), words.__getitem__)
    return StreamSamples(source, open_tokenizer("bytes"), DocumentPacking(8, None), 0)


def test_a_stream_is_compared_once_it_has_been_read_so_far() -> None:
    words = [f"document number {i} of a stream" for i in range(400)]
    first = stream(words)
    first.sample(2 * BLOCK)
    then = first.fingerprint()
    assert then["blocks"] == 3
    same = stream(words)
    same.expect(then)
    same.sample(2 * BLOCK)
    same.sample(0)  # read again from the beginning
    other = stream([*words[:5], "something else", *words[6:]])
    other.expect(then)
    other.sample(0)
    with pytest.raises(BadInput, match="not what the run was trained on"):
        other.sample(2 * BLOCK)
