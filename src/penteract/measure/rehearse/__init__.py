"""Rehearse a run: the engine's own walk of one rank in a world of any size, without devices, peers or numbers."""
