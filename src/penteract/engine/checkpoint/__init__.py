"""Checkpoints are logical: global tensors by name, as rectangles that any layout wrote and any other reads.

A committed step is a folder `step-00000050` with `rank-00000.safetensors` …, one for each rank that owned
something, and `manifest.json`: where every tensor's rectangles are, each with a digest of its
bytes. Nothing is a pickle.
"""

from penteract.engine.checkpoint.folder import latest
from penteract.engine.checkpoint.reading import extra, load, verify
from penteract.engine.checkpoint.rectangles import rectangles
from penteract.engine.checkpoint.slices import Slice
from penteract.engine.checkpoint.writing import save, save_alone

__all__ = ["Slice", "extra", "latest", "load", "rectangles", "save", "save_alone", "verify"]
