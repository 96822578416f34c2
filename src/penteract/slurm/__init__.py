"""Jobs of a Slurm cluster: their batch files, what they cost, and what Slurm says of them. Knows neither engine nor
planner."""
