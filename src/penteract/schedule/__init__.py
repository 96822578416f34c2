"""Pipeline schedules as values: generators, transfers between stages, and the proof that no rank deadlocks."""
