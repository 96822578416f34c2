"""What stands in the place of the library's streamed datasets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class ListedRows:
    """Rows of a list; one that is an error is raised."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.at = rows, 0
        self.state: dict[str, Any] | None = None

    def with_format(self, _: None) -> ListedRows:
        return ListedRows(self.rows)

    def skip(self, count: int) -> ListedRows:
        return ListedRows(self.rows[count:])

    def __iter__(self) -> Iterator[Any]:
        self.at = 0 if self.state is None else self.state["at"]
        for row in self.rows[self.at :]:
            self.at += 1
            if isinstance(row, Exception):
                raise row
            yield row

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state  # the library, too, reads it when it is iterated
