"""The Profile view: a measured step beside its prediction, ops, kernels, ranks, memory, and two profiles compared."""
