"""Checkpoints that are written while the run trains on: a snapshot, and the course of a save over all ranks."""
