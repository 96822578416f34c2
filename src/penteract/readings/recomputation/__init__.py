"""The cheapest recomputation within a memory budget."""
