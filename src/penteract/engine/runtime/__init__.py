"""Rank processes: start them, join a process group, watch for failures, end them together."""
