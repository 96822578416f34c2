"""Where each byte and FLOP of a price comes from: terms with their formulas and lines of code."""
