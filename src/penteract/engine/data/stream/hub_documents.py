"""Documents of a Hugging Face dataset: the field `text` of the split `train`, in the dataset's own order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penteract.engine.data.corpus import StreamedCorpus
from penteract.engine.data.stream.documents import Position
from penteract.errors import BadInput, CorruptData, DiskFailure, PenteractError


class HubDocuments:
    """A dataset that is streamed. Raises BadInput if there is none of that name, or the library is missing."""

    def __init__(self, corpus: StreamedCorpus) -> None:
        try:
            import datasets  # pyright: ignore[reportMissingImports]
        except ImportError as e:
            raise no_datasets(corpus) from e
        try:
            library: Any = datasets
            self._dataset: Any = library.load_dataset(corpus.name, corpus.config or None, split="train",
                                                      streaming=True, revision=corpus.revision or None)  # fmt: skip
        except Exception as e:  # the library raises many kinds: no such name, no network, no permission
            raise not_opened(corpus, e) from e
        self._corpus, self._version = corpus, str(library.__version__)

    @property
    def name(self) -> str:
        corpus = self._corpus
        return f"hf:{corpus.name}:{corpus.config}@{corpus.revision}"

    def open(self, position: Position | None = None) -> _Rows:
        return _Rows(self._dataset, self._version, f"hf:{self._corpus.name}", position)


class _Rows:
    def __init__(self, dataset: Any, version: str, where: str, position: Position | None) -> None:
        """`position`: {"row": how many were read before, "state": the library's, "version": the library's}. The state
        means nothing to another version, and one that has skipped rows gives no state that another reader knows: then
        the rows before are read over, without being tokenised."""
        self._dataset = dataset.with_format(None)  # a dataset has one position, which is of the loop begun last
        self._where, self._next, self._version = where, 0, version
        if position is not None:
            row, state, same = position.get("row"), position.get("state"), position.get("version") == version
            if not isinstance(row, int) or row < 0 or (same and not isinstance(state, dict)):
                raise CorruptData("STREAM", "the checkpoint's position in its dataset is damaged", where=where,
                                  found=str(dict(position))[:120],
                                  fix="use another step's checkpoint")  # fmt: skip
            self._next = row
            if same:
                self._dataset.load_state_dict(state)
            else:
                self._dataset, self._version = self._dataset.skip(self._next), ""
        self._rows: Iterator[dict[str, object]] = iter(self._dataset)

    def __iter__(self) -> _Rows:
        return self

    def __next__(self) -> str:
        try:
            row = next(self._rows)
        except (PenteractError, StopIteration):
            raise
        except Exception as e:  # the library raises many kinds: no network, a damaged file
            raise self._unreadable(e) from e
        text = row.get("text")
        if not isinstance(text, str):
            raise CorruptData("TEXT", 'no field "text" that holds a string', where=f"{self._where}, row {self._next}",
                              found=", ".join(row), fix='name a dataset with a field "text"')  # fmt: skip
        self._next += 1
        return text

    def position(self) -> Position:
        state = self._dataset.state_dict() if self._version else None
        return {"row": self._next, "state": state, "version": self._version}

    def _unreadable(self, e: Exception) -> DiskFailure:
        return DiskFailure("DATASET", "could not read the dataset", where=f"{self._where}, row {self._next}",
                           found=first_line(e),
                           fix="check the network and the dataset's files, then resume")  # fmt: skip


def first_line(e: Exception) -> str:
    """Of what a library says; its kind, where it says nothing."""
    return (str(e).splitlines() or [type(e).__name__])[0][:120]


def not_opened(corpus: StreamedCorpus, e: Exception) -> BadInput:
    """The error where the dataset cannot be opened."""
    at = f" at revision {corpus.revision}" if corpus.revision else ""
    return BadInput("SOURCE", "could not open the dataset", where=f"hf:{corpus.name}{at}", found=e,
                    fix="check its name, its config (hf:NAME:CONFIG) and the network")  # fmt: skip


def no_datasets(corpus: StreamedCorpus) -> BadInput:
    """The error where the library that streams is missing."""
    return BadInput("NO_DATASETS", "streaming from Hugging Face needs the library `datasets`",
                    found=f"hf:{corpus.name}", fix='pip install "penteract[hf]"')  # fmt: skip
