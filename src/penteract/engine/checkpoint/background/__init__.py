"""Checkpoints that are written in the background: memory that two processes share, and the process that writes it."""
