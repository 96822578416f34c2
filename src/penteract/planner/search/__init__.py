"""The search: bounds first, then estimates, simulated steps last."""
