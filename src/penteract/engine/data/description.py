"""What the data of a run is, without its contents: for ranks to compare before any of it is read."""

from __future__ import annotations

import hashlib
from pathlib import Path

from penteract.engine.data.corpus import StreamedCorpus, find_corpus
from penteract.errors import BadInput
from penteract.units import show_bytes


def describe(source: str | tuple[str, ...], tokenizer: str) -> dict[str, str]:
    """{"data": …, "tokenizer": …}: numbers of files and bytes, with digests of the files' names and sizes, and of the
    tokenizer's file. Hosts may have copies in other places, written at other times, so neither counts. A source that
    is not there is described by its error."""
    return {"data": _data(source), "tokenizer": _tokenizer(tokenizer)}


def _data(source: str | tuple[str, ...]) -> str:
    try:
        corpus = find_corpus(source)
        if isinstance(corpus, StreamedCorpus):
            return f"hf:{corpus.name}:{corpus.config}"
        sizes = [(path.name, path.stat().st_size) for path in corpus.files]
    except (BadInput, OSError) as e:
        return str(e)
    digest = hashlib.sha256(repr(sizes).encode()).hexdigest()[:12]
    return f"{len(sizes)} files of {show_bytes(sum(size for _, size in sizes))} ({digest})"


def _tokenizer(name: str) -> str:
    if name == "bytes":
        return name
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()[:12]
    except OSError as e:
        return str(e)
