"""From a preset, a run file and flags to a resolved run, and from a run to its file."""
