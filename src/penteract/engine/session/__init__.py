"""A training run from its first step to its last: loop, metrics, run folder, resuming, comparing."""
