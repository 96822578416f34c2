"""Memory and work of layers and stages: recorded once for each type of layer, summed over a stage."""
