"""Read single rectangles of a checkpoint. Only what is needed is in memory, and each stored rectangle is verified
once."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from penteract.engine.checkpoint import manifest
from penteract.engine.checkpoint.boxes import Box
from penteract.engine.checkpoint.reading import checked, opened, overlaps
from penteract.engine.checkpoint.slices import view
from penteract.engine.checkpoint.stored_boxes import StoredBox
from penteract.errors import BadInput


class StoredTensors:
    """The tensors of the checkpoint `at`. Files are memory-mapped, so the system can drop pages that were read.

    A stored rectangle's digest is checked when it is first read. Raises CorruptData when it differs.
    """

    def __init__(self, at: Path) -> None:
        self.at, self.manifest = at, manifest.read(at)
        self._files: dict[str, Any] = {}
        self._checked: set[StoredBox] = set()
        self._open = ExitStack()

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def refuse_others(self, wanted: dict[str, tuple[int, ...]]) -> None:
        """BadInput unless these tensors, with these shapes, are in the checkpoint."""
        stored = self.manifest.tensors
        wrong = [n for n, shape in wanted.items() if n not in stored or stored[n].shape != shape]
        if wrong:
            first = wrong[0]
            raise BadInput(
                "CHECKPOINT", f"{len(wrong)} tensors are missing or have another shape", where=str(self.at),
                found=f"{first} {stored[first].shape if first in stored else 'missing'}",
                allowed=f"{first} {wanted[first]}", fix="name the model that wrote it",
            )  # fmt: skip

    def rectangle(self, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """The box of one tensor, cast to `dtype`."""
        out = torch.empty(box[1], dtype=dtype)
        entry = self.manifest.tensors[name]
        for part, inner in overlaps(self.at, name, entry, box):
            view(out, inner, box[0]).copy_(view(self._tensor(part, entry.dtype), inner, part.box[0]))
        return out

    def _tensor(self, part: StoredBox, dtype: str) -> torch.Tensor:
        if part.file not in self._files:
            self._files[part.file] = self._open.enter_context(opened(self.at / part.file, part.key))
        handle = self._files[part.file]
        if part in self._checked:
            return handle.get_tensor(part.key)
        tensor = checked(self.at / part.file, handle, part, dtype)
        self._checked.add(part)
        return tensor
