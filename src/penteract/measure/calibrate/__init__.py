"""Measuring a machine: what its kernels reach while it is hot, written as the hardware file that plans read."""
