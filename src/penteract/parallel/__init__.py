"""The five dimensions, one file each: who holds which part, and the redistributions where ranks talk."""
