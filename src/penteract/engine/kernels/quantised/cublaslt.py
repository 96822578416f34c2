"""FP8 products by cuBLASLt, with one of the algorithms that it offers: not always its first, which torch takes.

With sums in fewer bits, kernels whose warp groups take tiles in turns are faster in a step than those whose groups
share a tile, which the heuristic puts first (`fp8_products_h200.json`). cuBLASLt has no name for the two kinds: an
option of the algorithm tells them apart, and its meaning belongs to a version. So other versions, GPUs and sizes have
what torch takes.

https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from penteract.config.rules.kernel_limits import HOPPER
from penteract.engine.kernels.quantised.quantise import Operand

LIBRARY = "libcublasLt.so.13"  # as torch has loaded it
SEEN = (130100,)  # versions whose options were looked at
IN_TURNS = (1, 2)  # the option of kernels whose warp groups take tiles in turns
ALIGNED = 256  # bytes: what cuBLASLt expects of addresses unless it is told otherwise
LEAST_FLOPS = 2**39  # of a product: smaller ones were not looked at

# Of cublasLt.h and library_types.h, version 13.
_FP32_SUMS, _TRANSPOSED = 68, 1
_TRANSPOSE_A, _SCALE_A, _SCALE_B, _FAST = 3, 17, 18, 25  # of a product's descriptor
_WORKSPACE = 1  # of a preference
_CUSTOM_OPTION = 5  # of an algorithm
_OFFERED = 16  # algorithms to ask for: there were eight
_TYPES = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29, torch.bfloat16: 14, torch.float32: 0}


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Offer(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm), ("workspace", ctypes.c_size_t), ("status", ctypes.c_int), ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


class PreparedProduct(NamedTuple):
    """A product of known sizes: its descriptor, the layouts of what it reads and writes, and the algorithm."""

    descriptor: ctypes.c_void_p
    first: ctypes.c_void_p
    second: ctypes.c_void_p
    out: ctypes.c_void_p
    algorithm: Algorithm


@dataclass(slots=True)
class Products:
    """Products on one GPU, of one thread. `library`: cuBLASLt's functions."""

    library: Any
    handle: ctypes.c_void_p = field(default_factory=ctypes.c_void_p)
    plans: dict[tuple[Any, ...], PreparedProduct | None] = field(
        default_factory=dict[tuple[Any, ...], PreparedProduct | None]
    )

    def __post_init__(self) -> None:
        """Make the handle."""
        _check(self.library.cublasLtCreate(ctypes.byref(self.handle)))

    def multiply(self, a: Operand, b: Operand, out: torch.Tensor, stream: int) -> bool:
        """a · bᵀ into `out` with sums in fewer bits; False, and nothing done, where no kernel takes tiles in turns. a
        [m, k], b [n, k] and out [m, n], each whole in memory, with a scale [1]."""
        key = (*a.data.shape, len(b.data), a.data.dtype, b.data.dtype, out.dtype)
        if key not in self.plans:
            self.plans[key] = self._plan(a.data, b.data, out)
        plan = self.plans[key]
        if plan is None:
            return False
        put, address = partial(self._put, plan.descriptor), ctypes.c_void_p
        put(_SCALE_A, address(b.scale.data_ptr()))
        put(_SCALE_B, address(a.scale.data_ptr()))
        made = address(out.data_ptr())
        status = self.library.cublasLtMatmul(
            self.handle, plan.descriptor, _ONE, address(b.data.data_ptr()), plan.first, address(a.data.data_ptr()),
            plan.second, _ZERO, made, plan.out, made, plan.out, ctypes.byref(plan.algorithm), None, ctypes.c_size_t(0),
            address(stream),
        )  # fmt: skip
        if status:  # it is torch's from now on
            warnings.warn(f"cuBLASLt answers with status {status} to a product of {key}", stacklevel=2)
            self.plans[key] = None
        return not status

    def _plan(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> PreparedProduct | None:
        """Columns come first in cuBLASLt: outᵀ [n, m] = b · aᵀ, where b is read transposed."""
        (m, k), n, library = a.shape, len(b), self.library
        descriptor = ctypes.c_void_p()
        _check(library.cublasLtMatmulDescCreate(ctypes.byref(descriptor), _FP32_SUMS, _TYPES[torch.float32]))
        self._put(descriptor, _TRANSPOSE_A, ctypes.c_int32(_TRANSPOSED))
        self._put(descriptor, _FAST, ctypes.c_int8(1))
        first, second, made = (self._layout(x, *sizes) for x, sizes in ((b, (k, n)), (a, (k, m)), (out, (n, m))))
        preference, offers, found = ctypes.c_void_p(), (Offer * _OFFERED)(), ctypes.c_int()
        _check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        none = ctypes.c_size_t(0)  # no workspace, so that none has to be priced
        _check(library.cublasLtMatmulPreferenceSetAttribute(preference, _WORKSPACE, ctypes.byref(none), 8))
        status = library.cublasLtMatmulAlgoGetHeuristic(
            self.handle, descriptor, first, second, made, made, preference, _OFFERED, offers, ctypes.byref(found)
        )
        some = offers[: found.value] if not status else ()
        in_turns = [offer.algorithm for offer in some if not offer.status and self._option(offer) in IN_TURNS]
        return PreparedProduct(descriptor, first, second, made, in_turns[0]) if in_turns else None

    def _layout(self, x: torch.Tensor, rows: int, columns: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        _check(self.library.cublasLtMatrixLayoutCreate(ctypes.byref(made), _TYPES[x.dtype], *sizes))
        return made

    def _put(self, descriptor: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _check(self.library.cublasLtMatmulDescSetAttribute(descriptor, attribute, ctypes.byref(value), size))

    def _option(self, offer: Any) -> int:
        value, written = ctypes.c_int(-1), ctypes.c_size_t()
        self.library.cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.byref(offer.algorithm),
            _CUSTOM_OPTION,
            ctypes.byref(value),
            ctypes.c_size_t(4),
            ctypes.byref(written),
        )
        return value.value


_ONE, _ZERO = ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt answers with status {status}")


@cache
def products(device: torch.device) -> Products | None:
    """Those of a GPU; None where its kind, or the version of cuBLASLt, was not looked at."""
    if torch.cuda.get_device_capability(device) != HOPPER:
        return None
    with torch.cuda.device(device):  # a handle is of the current one
        return _loaded()


def _loaded() -> Products | None:
    try:
        library: Any = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return Products(library) if library.cublasLtGetVersion() in SEEN else None


def multiplied(a: Operand, b: Operand, out: torch.Tensor) -> bool:
    """a · bᵀ into `out` with sums in fewer bits, as `Products` has it; False, and nothing done, where it is no case."""
    (m, k), n = a.data.shape, len(b.data)
    if 2 * m * n * k < LEAST_FLOPS:
        return False
    tensors: Sequence[torch.Tensor] = (a.data, b.data, out)
    if not all(x.dtype in _TYPES and x.is_contiguous() and x.data_ptr() % ALIGNED == 0 for x in tensors):
        return False
    made = products(out.device)
    return made is not None and made.multiply(a, b, out, torch.cuda.current_stream(out.device).cuda_stream)
