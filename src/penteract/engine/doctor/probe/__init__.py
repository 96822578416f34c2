"""Probes of a machine, one source of information in each file. A value that cannot be found out is None, never a
guess."""
