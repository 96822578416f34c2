"""From a question (a model, GPUs, a batch) to its best layouts, with reasons."""
