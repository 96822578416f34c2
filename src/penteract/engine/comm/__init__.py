"""Communication with other ranks: the only place that issues collectives and messages."""
