"""Reading one: price it. No torch."""
