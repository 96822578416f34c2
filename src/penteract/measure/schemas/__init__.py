"""The files that measurements leave, as values: what the explorer and other programs read. Standard library alone."""
