"""Documents of a list, as a stream of them, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class ListedDocuments:
    """Documents that are made from their number. `opened`: the documents at which each reader began; `read`: how many
    were read by all."""

    def __init__(self, count: int, document: Callable[[int], str]) -> None:
        self.count, self.document, self.name = count, document, "listed"
        self.opened, self.read = list[int](), 0

    def open(self, position: Mapping[str, Any] | None = None) -> _Reader:
        at = 0 if position is None else int(position["row"])
        self.opened.append(at)
        return _Reader(self, at)


class _Reader:
    def __init__(self, listed: ListedDocuments, at: int) -> None:
        self.listed, self.at = listed, at

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self.at == self.listed.count:
            raise StopIteration
        self.at, self.listed.read = self.at + 1, self.listed.read + 1
        return self.listed.document(self.at - 1)

    def position(self) -> Mapping[str, Any]:
        return {"row": self.at}
