"""Profiling a run: its steps measured on every rank, laid over the predicted timeline by the names that both carry."""
