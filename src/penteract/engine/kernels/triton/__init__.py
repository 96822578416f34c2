"""GPU kernels in Triton. They are only imported for layouts that choose them (`kernels.elementwise`)."""

from importlib.util import find_spec

if find_spec("triton") is not None:
    from penteract.engine.device.cache_keys import callees_first

    callees_first()  # before a kernel has a key
