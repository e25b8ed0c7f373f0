"""GEMMs of large M on GPUs by cuBLASLt, with the algorithms that were the fastest on this node.

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

from ..device import current_stream

MAX_PROPOSALS = 8  # proposals for a GEMM
KEPT = 4096  # plans: steps with prompts may have any number of rows
WORKSPACE = 32 << 20  # bytes; as many as torch gives the library on Hopper
ALIGNED = 256  # bytes; what the library supposes of addresses unless told otherwise

# The values of cublasLt.h and library_types.h.
TYPES = {torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_16F, CUDA_R_16BF
_COMPUTE_F32, _F32 = 68, 0  # CUBLAS_COMPUTE_32F, CUDA_R_32F
_TRANSPOSE_A, _TRANSPOSED = 3, 1  # CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T
_EPILOGUE, _ADD_BIAS = 7, 4  # CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS
_BIAS, _BIAS_STRIDE = 8, 10  # CUBLASLT_MATMUL_DESC_BIAS_POINTER, ..._BIAS_BATCH_STRIDE
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
    """Sizes of a weight, and of where its outputs go."""

    dtype: torch.dtype
    outputs: int
    inputs: int
    parts: int = 1  # that the outputs are cut into: [parts, rows, outputs / parts]
    apart: int = 0  # elements from one part to the next
    bias: bool = False  # one is added


def sizes_of(weight: Tensor, bias: bool) -> GemmShape:
    """The sizes of the whole GEMM of a weight [O, I]."""
    outputs, inputs = weight.shape
    return GemmShape(weight.dtype, outputs, inputs, bias=bias)


class Plan(NamedTuple):
    """An algorithm, and the layouts of what it multiplies: the library sees columns where torch has rows."""

    matmul: ctypes.c_void_p
    algorithm: Any
    of_weight: ctypes.c_void_p
    of_x: ctypes.c_void_p
    of_y: ctypes.c_void_p


class Library:
    """cuBLASLt on one device, which is the current one. Raises OSError where it cannot be used."""

    def __init__(self) -> None:
        self._lib = load()
        self.version = self._lib.cublasLtGetVersion()
        self.choices: dict[GemmShape, dict[int, Algo]] = {}  # by measured rows; `choose` sets what is in use
        self.plan = functools.lru_cache(KEPT)(self._plan)
        self.near_plan = functools.lru_cache(KEPT)(self._near_plan)
        self._layout = functools.cache(self._make_layout)
        self._biased = functools.cache(self._make_biased)
        self._one, self._zero = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))
        self._handle = self._create("cublasLtCreate")
        self._unbiased = self._make_matmul()
        self._wishes = self._create("cublasLtMatmulPreferenceCreate")
        set_wish = "cublasLtMatmulPreferenceSetAttribute"
        self._set(set_wish, self._wishes, _MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE))
        self._set(set_wish, self._wishes, _REDUCTIONS, ctypes.c_uint32(_IN_F32))

    def choose(self, choices: dict[GemmShape, dict[int, Algo]]) -> None:
        """Take these from now on."""
        self.choices = choices
        self.plan.cache_clear()
        self.near_plan.cache_clear()

    def proposals(self, sizes: GemmShape, rows: int) -> list[bytes]:
        """Algorithms; the first is what the library deems the fastest. Each may serve other numbers of rows, too."""
        layouts = self._layouts(sizes, rows)
        found, count = (_Proposal * MAX_PROPOSALS)(), _INT()
        status = self._lib.cublasLtMatmulAlgoGetHeuristic(
            self._handle,
            self._matmul(sizes),
            *layouts,
            layouts[-1],
            self._wishes,
            MAX_PROPOSALS,
            found,
            ctypes.byref(count),
        )
        if status:  # there is none
            return []
        return [bytes(one.algorithm) for one in found[: count.value] if not one.state]

    def run(self, plan: Plan, x: Tensor, weight: Tensor, y: int, bias: Tensor | None = None) -> bool:
        """To address y [T, O] = x [T, I] times the transpose of weight [O, I]; False where the library refuses.

        bias: [O], where the plan's GEMM adds one. Plans share what tells the library where the bias lies, so that one
        thread calls this at a time.
        """
        if bias is not None:
            self._describe(plan.matmul, _BIAS, _P(bias.data_ptr()))
        stream = current_stream()
        status = self._lib.cublasLtMatmul(
            self._handle, plan.matmul,
            self._one, weight.data_ptr(), plan.of_weight, x.data_ptr(), plan.of_x,
            self._zero, y, plan.of_y, y, plan.of_y,
            plan.algorithm, workspace(x.device, stream).data_ptr(), WORKSPACE, stream,
        )  # fmt: skip
        return status == 0

    def plan_of(self, algorithm: bytes, sizes: GemmShape, rows: int) -> Plan:
        return Plan(self._matmul(sizes), _Algorithm.from_buffer_copy(algorithm), *self._layouts(sizes, rows))

    def _plan(self, sizes: GemmShape, rows: int) -> Plan | None:
        """The plan chosen for so many rows; None: torch's, or there is none."""
        algo = self.choices.get(sizes, {}).get(rows)
        return None if algo is None else self.plan_of(algo, sizes, rows)

    def _near_plan(self, rows: int, shape: torch.Size, dtype: torch.dtype, bias: bool) -> tuple[int, Plan | None]:
        """The nearest tuned GEMM of a weight like this: the count of `nearest`, and the plan for it."""
        outputs, inputs = shape
        sizes = GemmShape(dtype, outputs, inputs, bias=bias)
        count = nearest(rows, self.choices.get(sizes, {}))
        return count, self.plan(sizes, count)

    def _matmul(self, sizes: GemmShape) -> ctypes.c_void_p:
        if not sizes.bias:
            return self._unbiased
        return self._biased(sizes.outputs // sizes.parts if sizes.parts > 1 else 0)

    def _layouts(self, sizes: GemmShape, rows: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]:
        dtype, outputs, inputs, parts, apart, _ = sizes
        layout, part = functools.partial(self._layout, dtype), outputs // parts
        of_weight = layout(inputs, part, inputs, parts, part * inputs)
        return of_weight, layout(inputs, rows, inputs, parts, 0), layout(part, rows, part, parts, apart)

    def _make_matmul(self) -> ctypes.c_void_p:
        matmul = self._create("cublasLtMatmulDescCreate", _COMPUTE_F32, _F32)
        self._describe(matmul, _TRANSPOSE_A, ctypes.c_int32(_TRANSPOSED))
        return matmul

    def _make_biased(self, apart: int) -> ctypes.c_void_p:
        """apart: elements from the bias of one batch to that of the next."""
        matmul = self._make_matmul()
        self._describe(matmul, _EPILOGUE, ctypes.c_uint32(_ADD_BIAS))
        self._describe(matmul, _BIAS, _P(ALIGNED))  # until `run` sets it: proposals depend on its alignment
        if apart:
            self._describe(matmul, _BIAS_STRIDE, ctypes.c_int64(apart))
        return matmul

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

    def _describe(self, matmul: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self._set("cublasLtMatmulDescSetAttribute", matmul, attribute, value)

    def _set(self, function: str, what: ctypes.c_void_p, attribute: int, value: Any) -> None:
        _check(getattr(self._lib, function)(what, attribute, ctypes.byref(value), ctypes.sizeof(value)), function)


in_use: dict[torch.device, Library] = {}  # where something was chosen


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of weight [O, I], plus bias [O]: [T, O], accumulated in f32. By torch where nothing
    was chosen.

    Rows between two measured counts are computed as the larger one, with whatever lies in memory for the others: the
    library has a kernel for nearly every count, and waits for the whole GPU when it loads one.
    """
    library = library_for(x, weight, bias)
    if library is None:
        return torch_linear(x, weight, bias)
    rows, inputs = x.shape
    count, plan = library.near_plan(rows, weight.shape, weight.dtype, bias is not None)
    if not count:
        return torch_linear(x, weight, bias)
    if count > rows:
        whole = x.new_empty(count, inputs)
        whole[:rows] = x
        x = whole
    y = None
    if plan is not None:
        y = x.new_empty(count, weight.shape[0])
        if not library.run(plan, x, weight, y.data_ptr(), bias):
            y = None
    if y is None:
        y = torch_linear(x, weight, bias)
    return y if count == rows else y[:rows]


def library_for(x: Tensor, *others: Tensor | None) -> Library | None:
    """The tuned GEMM of x [T, I] with these, where something was chosen on their device and it can read them all."""
    library = in_use.get(x.device)
    if library is None or x.dim() != 2 or not plain(x):
        return None
    for one in others:
        if one is not None and not (one.dtype == x.dtype and plain(one)):
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
