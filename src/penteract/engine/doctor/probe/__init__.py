"""Asking a machine. Each file asks one kind of source; what cannot be asked is None, never a guess."""
