"""Sweeps of a folder, or a table of cases that the reader has, as figures: what `penteract bench show` says, and more.

It reads regular files below the given folder alone, and follows no link. Standard library alone: it runs in browsers.
"""
