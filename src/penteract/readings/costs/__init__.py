"""Seconds of kernels and collectives, by what was measured of the hardware."""
