"""Predictions without torch: memory, FLOPs, traffic, time."""
