"""GEMMs of many rows on GPUs by cuBLASLt, with the algorithms that were the fastest on this node.

torch takes the first algorithm that the library proposes for some sizes, which can be far from the best: on an H200,
448 rows of bf16 with a weight of 28672 x 4096 take 269 us, and 153 with the second (2026-11-22). autotune.py measures
them before the first step; here is how they are found and called.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

MOST = 8  # proposals for a GEMM
WORKSPACE = 32 << 20  # bytes; as many as torch gives the library on Hopper
ALIGNED = 256  # bytes; what the library supposes of addresses unless told otherwise

# The values of cublasLt.h and library_types.h.
TYPES = {torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_16F, CUDA_R_16BF
_COMPUTE_F32, _F32 = 68, 0  # CUBLAS_COMPUTE_32F, CUDA_R_32F
_TRANSPOSE_A, _TRANSPOSED = 3, 1  # CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T
_MAX_WORKSPACE, _REDUCTIONS = 1, 3  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, ..._REDUCTION_SCHEME_MASK
_IN_F32 = 2  # CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: no sums of parts in the narrower type
_BATCHES, _BATCH_STRIDE = 5, 6  # CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, ..._STRIDED_BATCH_OFFSET
_PATH = re.compile(r"/.*/libcublasLt\.so\.1[23][.\d]*$", re.M)

_P, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_FUNCTIONS: dict[str, list[Any]] = {
    "cublasLtCreate": [_P],
    "cublasLtMatmulDescCreate": [_P, _INT, _INT],
    "cublasLtMatmulDescSetAttribute": [_P, _INT, _P, _SIZE],
    "cublasLtMatmulPreferenceCreate": [_P],
    "cublasLtMatmulPreferenceSetAttribute": [_P, _INT, _P, _SIZE],
    "cublasLtMatrixLayoutCreate": [_P, _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
    "cublasLtMatrixLayoutSetAttribute": [_P, _INT, _P, _SIZE],
    "cublasLtMatmulAlgoGetHeuristic": [_P, _P, _P, _P, _P, _P, _P, _INT, _P, _P],
    "cublasLtMatmul": [*[_P] * 14, _SIZE, _P],
}
_Algorithm = ctypes.c_uint64 * 8  # opaque; may be kept for the same version of the library
ALGORITHM = ctypes.sizeof(_Algorithm)  # bytes

Algo = bytes | None  # an algorithm; None: torch's


class _Proposal(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", _SIZE),
        ("state", _INT),
        ("waves", ctypes.c_float),
        ("reserved", _INT * 4),
    ]


class GemmShape(NamedTuple):
    """Of a weight, and of where its outputs go."""

    dtype: torch.dtype
    outputs: int
    inputs: int
    parts: int = 1  # that the outputs are cut into: [parts, rows, outputs / parts]
    apart: int = 0  # elements from one part to the next
    splits: int = 1  # of the inputs, each of which makes a partial sum: [rows, splits, outputs]


class Plan(NamedTuple):
    """An algorithm, and the layouts of what it multiplies: the library sees columns where torch has rows."""

    algorithm: Any
    of_weight: ctypes.c_void_p
    of_x: ctypes.c_void_p
    of_y: ctypes.c_void_p


class Library:
    """cuBLASLt on one device, which is the current one. Raises OSError where it cannot be used."""

    def __init__(self) -> None:
        self._lib = load()
        self.version = self._lib.cublasLtGetVersion()
        self.choices: dict[GemmShape, dict[int, Algo]] = {}  # by measured rows
        self.plan = functools.cache(self._plan)
        self._layout = functools.cache(self._make_layout)
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._handle = self._create("cublasLtCreate")
        self._matmul = self._create("cublasLtMatmulDescCreate", _COMPUTE_F32, _F32)
        self._set("cublasLtMatmulDescSetAttribute", self._matmul, _TRANSPOSE_A, ctypes.c_int32(_TRANSPOSED))
        self._wishes = self._create("cublasLtMatmulPreferenceCreate")
        set_wish = "cublasLtMatmulPreferenceSetAttribute"
        self._set(set_wish, self._wishes, _MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE))
        self._set(set_wish, self._wishes, _REDUCTIONS, ctypes.c_uint32(_IN_F32))

    def proposals(self, sizes: GemmShape, rows: int) -> list[bytes]:
        """Algorithms; the first is what the library deems the fastest. Each may serve other numbers of rows, too."""
        layouts = self._layouts(sizes, rows)
        found, count = (_Proposal * MOST)(), _INT()
        status = self._lib.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._matmul, *layouts, layouts[-1], self._wishes, MOST, found, ctypes.byref(count)
        )
        if status:  # there is none
            return []
        return [bytes(one.algorithm) for one in found[: count.value] if not one.state]

    def run(self, plan: Plan, x: Tensor, weight: Tensor, y: int) -> bool:
        """To address y [T, O] = x [T, I] times the transpose of weight [O, I]; False where the library refuses."""
        stream = torch.cuda.current_stream().cuda_stream
        status = self._lib.cublasLtMatmul(
            self._handle, self._matmul,
            ctypes.byref(self._one), weight.data_ptr(), plan.of_weight, x.data_ptr(), plan.of_x,
            ctypes.byref(self._zero), y, plan.of_y, y, plan.of_y,
            plan.algorithm, workspace(x.device, stream).data_ptr(), WORKSPACE, stream,
        )  # fmt: skip
        return status == 0

    def plan_of(self, algorithm: bytes, sizes: GemmShape, rows: int) -> Plan:
        return Plan(_Algorithm.from_buffer_copy(algorithm), *self._layouts(sizes, rows))

    def _plan(self, sizes: GemmShape, rows: int) -> Plan | None:
        """By the choice made for so many rows; None: torch's."""
        algo = self.choices[sizes][rows]
        return None if algo is None else self.plan_of(algo, sizes, rows)

    def _layouts(self, sizes: GemmShape, rows: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]:
        dtype, outputs, inputs, parts, apart, splits = sizes
        layout, part, width = functools.partial(self._layout, dtype), outputs // parts, inputs // splits
        if splits > 1:
            of_y = layout(outputs, rows, splits * outputs, splits, outputs)
            return layout(width, outputs, inputs, splits, width), layout(width, rows, inputs, splits, width), of_y
        of_weight = layout(inputs, part, inputs, parts, part * inputs)
        return of_weight, layout(inputs, rows, inputs, parts, 0), layout(part, rows, part, parts, apart)

    def _make_layout(
        self, dtype: torch.dtype, width: int, rows: int, pitch: int, batches: int, apart: int
    ) -> ctypes.c_void_p:
        """pitch: elements from one row to the next. apart: from one batch to the next."""
        layout = self._create("cublasLtMatrixLayoutCreate", TYPES[dtype], width, rows, pitch)
        if batches > 1:
            set_layout = functools.partial(self._set, "cublasLtMatrixLayoutSetAttribute", layout)
            set_layout(_BATCHES, ctypes.c_int32(batches))
            set_layout(_BATCH_STRIDE, ctypes.c_int64(apart))
        return layout

    def _create(self, function: str, *args: int) -> ctypes.c_void_p:
        made = _P()
        _check(getattr(self._lib, function)(ctypes.byref(made), *args), function)
        return made

    def _set(self, function: str, what: ctypes.c_void_p, attribute: int, value: Any) -> None:
        _check(getattr(self._lib, function)(what, attribute, ctypes.byref(value), ctypes.sizeof(value)), function)


in_use: dict[torch.device, Library] = {}  # where something was chosen


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, I] times the transpose of weight [O, I]: [T, O], accumulated in f32. By torch where nothing was chosen.

    Rows between two measured counts are computed as the larger one, with whatever lies in memory for the others: the
    library has a kernel for nearly every count, and waits for the whole GPU when it loads one.
    """
    library = library_for(x, weight)
    if library is None:
        return torch_linear(x, weight)
    rows, sizes = len(x), GemmShape(x.dtype, *weight.shape)
    count = nearest(rows, library.choices.get(sizes, {}))
    if not count:
        return torch_linear(x, weight)
    if count > rows:
        whole = x.new_empty(count, x.shape[1])
        whole[:rows] = x
        x = whole
    plan = library.plan(sizes, count)
    if plan is not None:
        y = x.new_empty(count, len(weight))
        if library.run(plan, x, weight, y.data_ptr()):
            return y[:rows]
    return torch_linear(x, weight)[:rows]


def library_for(x: Tensor, weight: Tensor) -> Library | None:
    """What multiplies these two, where something was chosen on their device and it can read both."""
    library = in_use.get(x.device)
    if library is None or x.dim() != 2 or x.dtype != weight.dtype or not plain(x) or not plain(weight):
        return None
    return library


def plain(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % ALIGNED == 0


def nearest(rows: int, counts: Iterable[int]) -> int:
    """The measured count whose algorithm serves so many rows; 0: none is near enough."""
    count = min((count for count in counts if count >= rows), default=0)
    return count if rows > count * 0.75 else 0


@functools.cache
def load() -> ctypes.CDLL:
    """The library that torch has loaded: a machine may have others as well. Raises OSError."""
    path = _PATH.search(Path("/proc/self/maps").read_text())
    if path is None:
        raise OSError("PyTorch has not loaded libcublasLt.so.12 or libcublasLt.so.13")
    lib = ctypes.CDLL(path[0])
    try:
        lib.cublasLtGetVersion.restype = _SIZE
        for name, types in _FUNCTIONS.items():
            getattr(lib, name).argtypes = types
    except AttributeError as error:
        raise OSError(str(error)) from None
    return lib


def _check(status: int, function: str) -> None:
    if status:
        raise OSError(f"{function} fails with status {status}")


@functools.cache
def workspace(device: torch.device, stream: int) -> Tensor:
    """[WORKSPACE] bytes. Of one stream, as GEMMs that run at once must not share them. Graphs keep their address."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
