"""Sections of docs/benchmarks.md, which `benchmarks/tables.py` writes: a function each, which tells what falls short, too."""
