"""What the processes of a case do: join, build a trainer, take timed steps, say what was measured."""
