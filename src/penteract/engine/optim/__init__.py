"""The parameter update: optimizers, their moments and master weights, loss scaling, stochastic rounding."""
