"""What a run tells of its steps: metrics.jsonl, the table on the terminal, trackers."""
