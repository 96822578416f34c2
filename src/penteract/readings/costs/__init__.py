"""Seconds of kernels and collectives, from measurements of the hardware."""
