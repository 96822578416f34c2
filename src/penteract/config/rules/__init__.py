"""Which layouts are legal, the nearest legal one, and what a run file leaves open."""
