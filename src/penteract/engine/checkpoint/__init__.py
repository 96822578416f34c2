"""Checkpoints hold global tensors by name, as rectangles: any layout can read what another layout wrote.

A committed step is a folder `step-00000050` with `rank-00000.safetensors` …, one file for each rank that owns
rectangles, and `rank-00000-00001.safetensors` … where one would be larger than `LARGEST_FILE`; `rectangles.bin`: where
every tensor's rectangles are, each with a digest of its bytes; and `manifest.json`, which has the tensors, and digests
of these tables. Nothing is pickled.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penteract.engine.checkpoint.durable import failing, room
from penteract.engine.checkpoint.folder import (
    DAMAGED,
    Committed,
    check,
    committed,
    end_epoch,
    intact,
    latest,
    prove,
    prune,
    set_aside,
    take,
)
from penteract.engine.checkpoint.packing import most_files
from penteract.engine.checkpoint.rectangles import rectangles

if TYPE_CHECKING:
    from penteract.engine.checkpoint.reading import extra, load, verify, verify_share
    from penteract.engine.checkpoint.slices import Slice
    from penteract.engine.checkpoint.writing import save, save_alone

__all__ = [
    "DAMAGED",
    "Committed", "Slice", "check", "committed", "end_epoch", "extra", "failing", "intact", "latest", "load",
    "most_files", "prove", "prune", "rectangles", "room", "save", "save_alone", "set_aside", "take", "verify",
    "verify_share",
]  # fmt: skip

_OF_TORCH = {
    **dict.fromkeys(("extra", "load", "verify", "verify_share"), "reading"), "Slice": "slices",
    **dict.fromkeys(("save", "save_alone"), "writing"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first asked for: the process that writes in the background has none."""
    if name not in _OF_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OF_TORCH[name]}"), name)
