"""The kernels: what each op computes on tensors. Other kernels are tested against the reference ones, in plain
torch."""
