"""The loss with its gradient: one program a row, or several that share it."""
