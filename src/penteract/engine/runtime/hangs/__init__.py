"""Hangs: each rank notes and tells how far it is, and one rank finds out what a hung run waits for."""
