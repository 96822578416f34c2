"""The update: optimizers, their moments and master weights, loss scaling, rounding."""
