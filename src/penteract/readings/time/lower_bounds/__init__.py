"""Lower bounds of the step time: what a search asks before it simulates a step."""
