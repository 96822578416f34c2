"""Seconds as a reading of the step: a call's cost, the clock that plays it, the ranks of a pipeline, the timeline."""
