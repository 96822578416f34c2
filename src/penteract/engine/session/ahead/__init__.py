"""Kernels that are compiled as a run starts, before its ranks need them."""
