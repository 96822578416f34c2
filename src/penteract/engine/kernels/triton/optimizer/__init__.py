"""Kernels of the update: AdamW of a shard, and the sum of squares for the gradient norm."""
