"""Attention by the kernels of libraries: torch's cuDNN and FlashAttention-2, and FlashAttention-4."""
