"""Kernels of mixture-of-experts ops, in plain torch, and the grouped products of torch and quack."""
