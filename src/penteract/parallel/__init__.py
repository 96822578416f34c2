"""The five dimensions, one file each: who holds which part, and the seams where ranks talk."""
