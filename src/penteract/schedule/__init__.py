"""Pipeline schedules as values: generators, the transfers between stages, and the proof that no rank deadlocks."""
