"""Run files and flags: their keys, reading, checking and writing."""
