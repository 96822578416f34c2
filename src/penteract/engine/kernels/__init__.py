"""The kernels: what each op does to tensors. `reference` is plain torch, the truth that other kernels are held to."""
