"""What a rank keeps between steps: parameters, gradients, moments, master weights, and scales of losses and of FP8."""
