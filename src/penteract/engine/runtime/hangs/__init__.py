"""Ranks whose main threads hang: how far each is, what it tells the others, and who is to blame."""
