"""A plan as text, JSON, run file or trace, and the reasons for it."""
