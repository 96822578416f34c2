"""The search: bounds first, prices next, simulated steps last."""
