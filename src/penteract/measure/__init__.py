"""Measure what a plan predicts: a machine, a step, a sweep. It may use both predictions and runs."""
