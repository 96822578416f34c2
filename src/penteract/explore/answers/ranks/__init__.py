"""The Ranks view: the mesh on its nodes, the traffic of a rank, and who holds a parameter."""
