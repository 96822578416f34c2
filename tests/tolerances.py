"""Every tolerance of the suite, once, with its reason."""

# float64 has 53 bits; sums over a few thousand terms in another order lose at most ~5 digits of the 16.
PARITY = 1e-10
# A gradient that is zero in exact arithmetic (a key bias without rotary positions) is rounding noise of this size.
ZERO = 1e-13
