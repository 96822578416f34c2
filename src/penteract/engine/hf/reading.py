"""Read any box of a penteract tensor from Hugging Face files, converting layout; only the bytes needed are read."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penteract.engine.checkpoint.boxes import Box, meet
from penteract.engine.checkpoint.slices import view
from penteract.engine.hf.folder import HfFolder
from penteract.errors import CorruptData
from penteract.model.hf_names import HfPart

_MEAN_CHUNK = 2**24  # elements of a table that are averaged at once


class HfWeights:
    """The weights of a checked folder. Files are memory-mapped, so the system can drop pages that were read."""

    def __init__(self, folder: HfFolder) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}

    def rectangle(self, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """The box (offset, size) of one of our tensors, in `dtype`."""
        tensor = self.folder.ours[name]
        out = torch.empty(box[1], dtype=dtype)
        for part in tensor.parts:
            if inner := meet((part.start, part.size), box):
                view(out, inner, box[0]).copy_(self._part(part, inner))
        # Rows that pad the vocabulary are the last ones of the tensor, so also of the box.
        if tensor.padded and (rows := box[0][0] + box[1][0] - tensor.parts[0].size[0]) > 0:
            out[-rows:] = self._mean(tensor.parts[0], box)
        return out

    def _part(self, part: HfPart, box: Box) -> torch.Tensor:
        """The values of a box of our tensor that lies inside `part`, in the shape of our tensor."""
        start = [at - from_ for at, from_ in zip(box[0], part.start, strict=True)]
        size = list(box[1])
        if part.stacked:
            del start[0], size[0]
        at, rows = start[0], size[0]
        # Whole heads: files store RoPE pairs adjacent, ours half a head apart (`Rotary`); so rows of a head move.
        if part.rotary is not None:
            group = part.rotary.group
            start[0] = at // group * group
            size[0] = -(-(at + rows) // group) * group - start[0]
        start[0] += part.first
        found = self._slice(part, start, size)
        if part.rotary is not None:
            found = found[part.rotary.order(size[0])].narrow(0, at - (start[0] - part.first), rows)
        return found.unsqueeze(0) if part.stacked else found

    def _slice(self, part: HfPart, start: list[int], size: list[int]) -> torch.Tensor:
        """Rows and columns of the file's tensor, transposed if ours is."""
        cut = [slice(at, at + n) for at, n in zip(start, size, strict=True)]
        found = self._lazy_slice(part.theirs)[tuple(reversed(cut)) if part.transposed else tuple(cut)]
        return found.T if part.transposed else found

    def _lazy_slice(self, theirs: str) -> Any:
        held = self.folder.held[theirs]
        path = str(held.file)
        try:
            if path not in self.files:
                self.files[path] = safe_open(path, framework="pt")
            return self.files[path].get_slice(held.key)
        except (SafetensorError, OSError) as e:
            raise CorruptData("WEIGHTS", "a file of weights is damaged", where=path, found=str(e)[:200],
                              fix="download it again") from e  # fmt: skip

    def _mean(self, part: HfPart, box: Box) -> torch.Tensor:
        """Rows that pad the vocabulary have no counterpart in the files.

        They get the mean of all rows, so that a padding row's logit is the mean logit.

        By Jensen's inequality an id that never occurs then gets at most the mean probability. A row of zeros would get
        a logit of zero, which in models whose logits are all far below zero is the largest of all.
        """
        rows, width = part.shape
        step = max(1, _MEAN_CHUNK // width)
        total = torch.zeros(width, dtype=torch.float64)
        for at in range(0, rows, step):
            total += self._slice(part, [at, 0], [min(step, rows - at), width]).double().sum(0)
        return (total / rows)[box[0][1] : box[0][1] + box[1][1]]
