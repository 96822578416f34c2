"""Edits of calls that put collectives beside what is computed."""
