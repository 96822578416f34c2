"""Precision as a value: dtypes, FP8 recipes, patterns for individual modules."""
