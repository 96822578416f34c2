"""Documents that can only be read forwards, from the first or from a position that was noted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

Position = Mapping[str, Any]  # as JSON


class OpenDocuments(Protocol):
    """Documents that are being read."""

    def __iter__(self) -> Iterator[str]:
        """Itself: a second loop goes on where the first stopped."""
        ...

    def __next__(self) -> str:
        """The next document."""
        ...

    def position(self) -> Position:
        """Of the document after the one that was read last."""
        ...


class Documents(Protocol):
    """A source of documents; several readers may have it open."""

    @property
    def name(self) -> str:
        """Another for each source in which a position means something else."""
        ...

    def open(self, position: Position | None = None) -> OpenDocuments:
        """To be read from a position on; None: from the first document."""
        ...


@dataclass(frozen=True)
class LaterDocuments:
    """All documents but the first `count`."""

    documents: Documents
    count: int

    @property
    def name(self) -> str:
        return f"{self.documents.name} from {self.count}"

    def open(self, position: Position | None = None) -> OpenDocuments:
        opened = self.documents.open(position)
        if position is None:
            for _ in islice(opened, self.count):
                pass
        return opened
