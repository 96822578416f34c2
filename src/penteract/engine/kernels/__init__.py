"""Kernels in Triton, each one pass over memory; imported where `kernels.elementwise` asks for them, and only there."""
