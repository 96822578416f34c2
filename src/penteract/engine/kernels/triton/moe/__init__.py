"""Routing and experts by Triton kernels."""
