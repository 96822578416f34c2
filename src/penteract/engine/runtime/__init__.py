"""Ranks as processes: started, joined, watched, ended together."""
