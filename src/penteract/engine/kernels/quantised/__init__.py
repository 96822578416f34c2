"""Kernels of linear layers and experts in FP8, and of quantisation."""
