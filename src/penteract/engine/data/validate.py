"""A run's data, looked at before its ranks start: a wrong file is refused in a moment, and nothing has been made.

Small data are opened as a rank opens them. Of large ones the beginnings are read: the rest is read once, by the rank
that tokenises it, or batch by batch.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from penteract.engine.data.corpus import StreamedCorpus, TextCorpus, TokenCorpus, find_corpus
from penteract.engine.data.open import LARGE, DataChoice, open_samples
from penteract.engine.data.stream.hub_documents import no_datasets
from penteract.engine.data.tokenizer import ByteTokenizer, TextTokenizer, open_tokenizer
from penteract.engine.data.tokens import check_ids
from penteract.errors import BadInput, DiskFailure
from penteract.units import MIB

FILES = 64  # of a large corpus
_PARTS = 8  # of each file: documents, or half a mebibyte of one
_TOKENISED = MIB // 2  # bytes of text that a tokenizer of a file, which is slower, is given


def check_data(data: DataChoice, tokenizer_name: str, sequence_length: int, vocab_size: int) -> None:
    """Raise what opening the data would raise on a rank, as far as a moment's look shows it: BadInput, CorruptData."""
    try:
        tokenizer = open_tokenizer(tokenizer_name)
        check_vocabulary(tokenizer, vocab_size)
        corpus = find_corpus(data.source)
        if isinstance(corpus, StreamedCorpus):
            if find_spec("datasets") is None:
                raise no_datasets(corpus)
        elif isinstance(corpus, TokenCorpus):
            check_ids(corpus.files, tokenizer)
            open_samples(data, tokenizer, sequence_length, 0)
        elif corpus.size() < (LARGE if isinstance(tokenizer, ByteTokenizer) else _TOKENISED):
            open_samples(data, tokenizer, sequence_length, 0)
        else:
            whole = corpus.size() < LARGE
            for path in corpus.files[: None if whole else FILES]:
                _read(path, None if whole else _PARTS)
    except OSError as e:
        if e.errno is None:
            raise
        raise _unreadable(e) from e


def check_vocabulary(tokenizer: TextTokenizer, vocab_size: int) -> None:
    """Raise BadInput if the model has fewer rows than the tokenizer has ids."""
    if tokenizer.vocab_size > vocab_size:
        raise BadInput("VOCABULARY", "the tokenizer has more ids than the model has rows", where="model.vocab_size",
                       found=vocab_size, allowed=f">= {tokenizer.vocab_size}",
                       fix=f"--model.vocab_size {-(-tokenizer.vocab_size // 64) * 64}")  # fmt: skip


def _read(path: Path, most: int | None) -> None:
    for _ in islice(TextCorpus("", (path,)).parts(), most):
        pass


def _unreadable(e: OSError) -> BadInput | DiskFailure:
    """A file that may not be read is bad input; a disk that fails is not."""
    where, found = str(e.filename or "data.source"), e.strerror
    if isinstance(e, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)):
        return BadInput("FILE", "cannot be read", where=where, found=found, fix="check the path and its permissions")
    return DiskFailure("DISK", "could not read", where=where, found=found, fix="check the disk")
