"""Run files and flags: their keys, and how they are read and checked."""
