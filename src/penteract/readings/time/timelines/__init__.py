"""The timeline of a step, and the trace that a viewer opens."""
