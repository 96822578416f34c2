"""GPU kernels in Triton. They are only imported for layouts that choose them (`kernels.elementwise`)."""
