"""What linear layers and experts in FP8 declare."""
