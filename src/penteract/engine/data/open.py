"""Open the training and validation data of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from penteract.engine.data.corpus import StreamedCorpus, TextCorpus, TokenCorpus, find_corpus
from penteract.engine.data.pack import DocumentPacking, Samples, WindowSamples, split
from penteract.engine.data.stream.hub_documents import HubDocuments
from penteract.engine.data.stream.shared_blocks import SharedFolder
from penteract.engine.data.stream.stream_samples import split_stream
from penteract.engine.data.tokenizer import TextTokenizer
from penteract.engine.data.tokens import TokenStream, is_complete, read_tokens, tokenize, write_tokens
from penteract.errors import BadInput
from penteract.units import MIB

AUTO = "auto"  # `DataChoice.revision`: the newest
LARGE = 16 * MIB  # text from this size on is tokenised once, into the cache folder


class DataChoice(Protocol):
    """The data settings of a run (see `config/run.py`)."""

    @property
    def source(self) -> str | tuple[str, ...]:
        """The built-in text, a file, several files, or a Hugging Face dataset."""
        ...

    @property
    def revision(self) -> str:
        """The commit of a Hugging Face dataset; "auto": the newest."""
        ...

    @property
    def validation_fraction(self) -> float:
        """The share of windows kept for validation, 0 to 1."""
        ...

    @property
    def pack_documents(self) -> bool:
        """Whether a window may hold several documents."""
        ...


def open_samples(
    data: DataChoice,
    tokenizer: TextTokenizer,
    sequence_length: int,
    seed: int,
    cache: Path | None = None,
    shared: SharedFolder | None = None,
) -> tuple[Samples, Samples]:
    """(train, validation) samples of `sequence_length` tokens; validation is empty when its fraction is 0.

    `cache` is a folder for the token ids of large texts; without it they stay in memory.  Processes may use it at the
    same time, but each one that finds no file does all the work: let one process of a host open the data first.
    `shared` is where processes of a host share the blocks of a stream; without it, each tokenises them.

    Raises BadInput when the source is missing, empty or shorter than a sequence, CorruptData when it is damaged.
    """
    packing = DocumentPacking(sequence_length, tokenizer.end_of_document if data.pack_documents else None)
    corpus = find_corpus(data.source)
    if isinstance(corpus, StreamedCorpus):
        documents = HubDocuments(replace(corpus, revision="" if data.revision == AUTO else data.revision))
        train, validation = split_stream(
            documents, tokenizer, packing, fraction=data.validation_fraction, seed=seed, shared=shared
        )
        needed: list[tuple[str, Samples]] = []
    else:
        tokens = _tokens_of(corpus, tokenizer, cache)
        if not len(tokens):
            raise BadInput("EMPTY", "the data holds no text", found=_names(data), fix="builtin needs no file")
        parts = split(tokens, data.validation_fraction, tokenizer.end_of_document)
        train = WindowSamples(parts[0], packing, seed)
        # The same order for every seed, so that the first few samples are the same text in every run.
        validation = WindowSamples(parts[1], packing, 0, one_order=True)
        needed = [("train", train)]
    if data.validation_fraction > 0:
        needed.append(("validation", validation))
    for part, samples in needed:
        if not len(samples):
            raise BadInput("TOO_SHORT", f"the {part} part of the data is shorter than one sample", where=_names(data),
                           allowed=f"at least {sequence_length + 1} tokens",
                           fix="shorter sequences, another validation_fraction (0: none), or more text")  # fmt: skip
    return train, validation


def _tokens_of(corpus: TextCorpus | TokenCorpus, tokenizer: TextTokenizer, cache: Path | None) -> TokenStream:
    if isinstance(corpus, TokenCorpus):
        return TokenStream(tuple(read_tokens(p, tokenizer) for p in corpus.files), tokenizer.vocab_size)
    if cache is None or corpus.size() < LARGE:
        arrays = list(tokenize(corpus.parts(), tokenizer))
        return TokenStream((np.concatenate(arrays),) if arrays else (), tokenizer.vocab_size)
    path = cache / f"{corpus.name}-{corpus.digest()[:16]}-{tokenizer.digest[:16]}.bin"
    if not is_complete(path):
        write_tokens(path, tokenize(corpus.parts(), tokenizer), tokenizer)
    return TokenStream((read_tokens(path, tokenizer),), tokenizer.vocab_size)


def _names(data: DataChoice) -> str:
    return data.source if isinstance(data.source, str) else " ".join(data.source)
