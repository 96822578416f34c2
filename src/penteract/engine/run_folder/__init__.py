"""The folder of a run: its files, who may write to it, and where its checkpoints are."""
