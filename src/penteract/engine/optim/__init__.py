"""The update: optimizers, their moments and masters, loss scaling, rounding."""
