"""Kernels of GPUs, in Triton: nothing imports them but a layout that asks for them (`kernels.elementwise`)."""
