"""One optimizer step: compiled once for a rank, walked by every reading."""
