"""How far predictions are from what was measured: today's planner, held to every row that was recorded."""
