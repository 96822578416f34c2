"""Memory of a rank, of its process and of its host."""
