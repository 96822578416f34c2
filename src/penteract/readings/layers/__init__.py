"""What layers and stages hold and do: recorded once for each type of layer, summed over a stage."""
