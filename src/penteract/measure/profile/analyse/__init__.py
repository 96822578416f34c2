"""From what all ranks measured, and from what was planned, to a profile."""
