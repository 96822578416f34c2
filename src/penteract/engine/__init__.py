"""Reading two: run it, on torch."""
