"""Every tolerance of the suite, once, with its reason."""

# float64 has 53 bits; sums over a few thousand terms in another order lose at most ~5 digits of the 16.
PARITY = 1e-10
# A gradient that is zero in exact arithmetic (a key bias without rotary positions) is rounding noise of this size.
ZERO = 1e-13
# How far a recipe's loss may be from fp32's at any of so many steps, relative. bf16 rounds to 2^-9, and what that makes
# of a step is carried on by the next: thirty steps on a falling loss were seen within 0.1 %, and within 0.5 % passes;
# updates rounded to the nearest are beyond it. Three hundred pass within 2 %.
DRIFT = {30: 0.005, 300: 0.02}
# Gradients of a layout and of one process in the same recipe, relative to each parameter's largest: sums are cut at
# other places, so each is rounded elsewhere: by 2^-9 in bf16 and 2^-12 in fp16, through about a hundred of them.
# Losses, which are fp32 sums over all tokens, agree ten times better.
LAYOUTS = {"bf16": 5e-2, "fp16": 8e-3}
# A mean of some hundred losses in fp32, relative: a layout adds them up in another order.
MEAN = 2e-6
