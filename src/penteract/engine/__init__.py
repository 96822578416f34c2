"""The reading of a program that runs it, with torch."""
