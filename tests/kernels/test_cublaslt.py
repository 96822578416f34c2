"""Products by cuBLASLt: which of its algorithms is taken, and what the library is told. The library is a stand-in: its
handles are numbers, and it writes down what it is told."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from penteract.engine.kernels.quantised import cublaslt
from penteract.engine.kernels.quantised.cublaslt import ALIGNED, IN_TURNS, Products, multiplied
from penteract.engine.kernels.quantised.quantise import Operand

M, N, K = 32, 48, 64
OFF = 0  # a status


def put(pointer: Any, value: int) -> None:
    pointer._obj.value = value


class Library:
    """Offers algorithms with these options; `told` has all that a product depends on."""

    def __init__(self, options: list[int], status: int = OFF) -> None:
        self.options, self.status, self.made = options, status, 0
        self.layouts = dict[int, tuple[int, ...]]()
        self.attributes = dict[int, int | None]()
        self.asked, self.products = 0, list[tuple[Any, ...]]()

    def _new(self, pointer: Any) -> int:
        self.made += 1
        put(pointer, self.made)
        return OFF

    def cublasLtCreate(self, handle: Any) -> int:
        return self.status or self._new(handle)

    def cublasLtMatmulDescCreate(self, made: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self._new(made)

    def cublasLtMatmulDescSetAttribute(self, made: Any, attribute: int, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.attributes[attribute] = value._obj.value
        return OFF

    def cublasLtMatrixLayoutCreate(self, made: Any, kind: int, rows: Any, columns: Any, lead: Any) -> int:
        self._new(made)
        self.layouts[self.made] = (kind, rows.value, columns.value, lead.value)
        return OFF

    def cublasLtMatmulPreferenceCreate(self, made: Any) -> int:
        return self._new(made)

    def cublasLtMatmulPreferenceSetAttribute(self, made: Any, attribute: int, value: Any, size: int) -> int:
        assert (attribute, value._obj.value, size) == (1, 0, 8)  # no workspace
        return OFF

    def cublasLtMatmulAlgoGetHeuristic(self, *about: Any) -> int:
        *_, most, offers, found = about
        self.asked += 1
        for i, option in enumerate(self.options[:most]):
            offers[i].algorithm.data[0] = option
            offers[i].algorithm.data[1] = i
        put(found, len(self.options))
        return OFF

    def cublasLtMatmulAlgoConfigGetAttribute(
        self, algorithm: Any, attribute: int, value: Any, size: Any, written: Any
    ) -> int:
        assert (attribute, size.value) == (5, 4)
        put(value, algorithm._obj.data[0])
        return OFF

    def cublasLtMatmul(self, *about: Any) -> int:
        self.products.append(about)
        return self.status


def aligned(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """As a GPU's memory is given out."""
    n = rows * columns
    room = torch.zeros(n + ALIGNED, dtype=dtype)
    begin = -room.data_ptr() % ALIGNED // room.element_size()
    return room[begin : begin + n].view(rows, columns)


def operands() -> tuple[Operand, Operand, torch.Tensor]:
    def new(rows: int, dtype: torch.dtype) -> Operand:
        return Operand(aligned(rows, K, dtype), torch.ones(1))

    return new(M, torch.float8_e5m2), new(N, torch.float8_e4m3fn), aligned(M, N, torch.bfloat16)


def test_the_first_algorithm_that_takes_tiles_in_turns_is_taken() -> None:
    library = Library([4, 7, 2, 1, 4])
    made, (a, b, out) = Products(library), operands()
    assert made.multiply(a, b, out, 5)
    _, _, one, first, of_first, second, of_second, zero, c, of_c, d, of_d, algorithm, workspace, size, stream = (
        library.products[0]
    )
    assert (one._obj.value, zero._obj.value, workspace, size.value, stream.value) == (1.0, 0.0, None, 0, 5)
    assert [x.value for x in (first, second, c, d)] == [b.data.data_ptr(), a.data.data_ptr(), *2 * [out.data_ptr()]]
    assert [library.layouts[x.value] for x in (of_first, of_second, of_c, of_d)] == [
        (28, K, N, K), (29, K, M, K), (14, N, M, N), (14, N, M, N)
    ]  # fmt: skip
    assert list(algorithm._obj.data[:2]) == [2, 2]
    assert library.attributes == {3: 1, 25: 1, 17: b.scale.data_ptr(), 18: a.scale.data_ptr()}


def test_a_product_is_planned_once_and_scales_are_told_each_time() -> None:
    library = Library([1])
    made, (a, b, out) = Products(library), operands()
    assert made.multiply(a, b, out, 0)
    again = Operand(a.data, torch.ones(1))
    assert made.multiply(again, b, out, 0)
    assert library.asked == 1 and library.attributes[18] == again.scale.data_ptr()
    assert made.multiply(b, b, torch.zeros(N, N), 0) and library.asked == 2


@pytest.mark.parametrize("options", [[], [3, 4, 7]])
def test_torch_multiplies_where_no_algorithm_takes_tiles_in_turns(options: list[int]) -> None:
    library = Library(options)
    made = Products(library)
    assert not set(options) & set(IN_TURNS)
    assert not made.multiply(*operands(), 0) and not made.multiply(*operands(), 0)
    assert not library.products and library.asked == 1


def test_what_the_library_refuses_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="status 7"):
        Products(Library([1], status=7))
    library = Library([1])
    made = Products(library)
    library.status = 13
    with pytest.warns(UserWarning, match="status 13"):
        assert not made.multiply(*operands(), 0)
    assert not made.multiply(*operands(), 0) and len(library.products) == 1


def test_small_products_and_those_in_pieces_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    library, asked = Library([1]), list[torch.device]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 0}))

    def products(device: torch.device) -> Products:
        asked.append(device)
        return Products(library)

    monkeypatch.setattr(cublaslt, "products", products)
    a, b, out = operands()
    assert not multiplied(a, b, out) and not asked
    monkeypatch.setattr(cublaslt, "LEAST_FLOPS", 2 * M * N * K)
    assert multiplied(a, b, out) and asked == [out.device]
    assert not multiplied(a, b, aligned(M, 2 * N, torch.bfloat16)[:, :N])
    assert not multiplied(a, b, aligned(M, N, torch.float16))
    assert not multiplied(a, b, aligned(M + 1, N, torch.bfloat16)[1:])
    assert len(library.products) == 1


@pytest.mark.parametrize(
    ("capability", "version", "there"), [((9, 0), 130100, True), ((9, 0), 130200, False), ((8, 0), 130100, False)]
)
def test_only_what_was_looked_at_is_chosen(
    capability: tuple[int, int], version: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loaded(Library):
        class cublasLtGetVersion:
            restype: Any = None

            def __new__(cls) -> int:
                return version

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(cublaslt.ctypes, "CDLL", lambda name, mode: Loaded([1]))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    assert (cublaslt.products.__wrapped__(torch.device("cuda")) is not None) == there


def test_without_the_library_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str, mode: int) -> None:
        raise OSError(name)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cublaslt.ctypes, "CDLL", none)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    assert cublaslt.products.__wrapped__(torch.device("cuda")) is None
