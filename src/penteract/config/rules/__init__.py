"""Which layouts are legal, the nearest legal one, and values that a run file leaves open."""
