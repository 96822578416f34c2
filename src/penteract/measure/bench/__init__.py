"""Sweeps: many layouts, each run for some steps in fresh processes, beside what the plan said of them."""
