"""Record and replay: what a CUDA graph is to a GPU. A step's operations, run again by one call without Python between.

Python between two operations is dear on a CPU: weights have just streamed through the caches, so that the interpreter's
own code has to come from memory again. `capture` calls a function as ever and keeps every C++ operation with its
arguments; `Graph.replay` runs the same list on the same memory. So what changes from step to step has to lie in tensors
that the caller fills, and may decide nothing in Python.

Whatever else computes would be missing from the list: torch's own operations, or others on a tensor's memory (NumPy,
MPI). Both are noticed, and there is no graph then, but the function's result holds. Additions in place, products with
a number for each row, matrices side by side and copies of rows become operations of ours, and allocations come out of
the graphs' own memory.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import ops

ALIGN = 64
aten = torch.ops.aten
ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# Functions that compute nothing, though torch does not call them views.
VIEWS = aten.detach.default, aten.lift_fresh.default, aten._unsafe_view.default
# Functions that read or lend a tensor's memory without an operation of torch's.
ESCAPES = {getattr(Tensor, name) for name in ("numpy", "tolist", "__array__", "__dlpack__")}


class Memory:
    """Memory of captured functions' tensors. One that is given up makes room for a later one of the same function, or
    of the next one captured: graphs that share this are replayed one at a time, and none reads what another left."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of free blocks: all of them, once every tensor is given up."""
        return sum(block.nbytes for block in self._free)

    def empty(self, like: Tensor) -> Tensor:
        size = max(like.untyped_storage().nbytes(), 1)
        fitting = [block for block in self._free if block.nbytes >= size]
        block = min(fitting, key=lambda block: block.nbytes) if fitting else _block(size)
        self._free = [one for one in self._free if one is not block]
        lent = block[:]  # torch holds this one as long as any tensor has its memory
        key = id(lent)
        self._lent[key] = weakref.ref(lent, lambda _: self._back(key, block))
        made = torch.from_numpy(lent).view(like.dtype)
        return made.as_strided(like.shape, like.stride())

    def owns(self, x: Tensor) -> bool:
        """Whether x is of a captured function, so that no caller has to keep it for its replays."""
        at = x.data_ptr()
        blocks = [one for one in (ref() for ref in self._lent.values()) if one is not None]
        return any(one.ctypes.data <= at < one.ctypes.data + one.nbytes for one in blocks)

    def _back(self, key: int, block: np.ndarray) -> None:
        self._lent.pop(key, None)
        self._free.append(block)


def _block(size: int) -> np.ndarray:
    """`size` bytes from a cache line's beginning on; whole lines, so that any dtype's view of it has no rest."""
    size = -(-size // ALIGN) * ALIGN
    room = np.empty(size + ALIGN, np.uint8)
    start = -room.ctypes.data % ALIGN
    return room[start : start + size]


class Graph:
    """The graph that `capture` has recorded."""

    def __init__(self, memory: Memory):
        self.memory = memory  # stays for as long as the calls point into it
        self._calls: list[tuple[int, bytes]] = []
        self._kept: dict[int, Tensor] = {}
        self._array: ctypes.Array[Any] | None = None
        self._threads = torch.get_num_threads()  # scratch is made for so many
        self.refused = ""  # why this is no graph

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, function: int, arguments: bytes, tensors: list[Tensor]) -> None:
        self._calls.append((function, arguments))
        for x in tensors:
            if not self.memory.owns(x):
                self._kept[x.data_ptr()] = x

    def refuse(self, reason: str) -> None:
        self.refused = self.refused or reason

    def replay(self) -> None:
        if self._array is None:
            self._array = ops.call_array(self._calls)
        ops.run_calls(self._array, len(self._calls), self._threads)


def capture(function: Callable[[], Any], memory: Memory) -> tuple[Any, Graph | None, str]:
    """function()'s result, a graph of it, and "". Without a graph: why there is none.

    The result holds until another graph of this memory is captured after it was given up, or one is replayed.
    """
    graph = Graph(memory)
    watch = _Watch(memory)
    before = ops.recording.recorder
    ops.recording.recorder = graph
    try:
        with _Escapes(watch), watch:
            result = function()
    finally:
        ops.recording.recorder = before
    reason = watch.reason or graph.refused
    return result, None if reason else graph, reason


class _Watch(TorchDispatchMode):
    """Sees every operation of torch's."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler at the first operation that is seen: 2 s in the middle of an answer."""
        return False

    def __init__(self, memory: Memory):
        super().__init__()
        self.memory = memory
        self.reason = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.add_.Tensor and not kwargs and _adds_plainly(*args):
            y, x = args
            ops.typed("norm", "add", y.dtype)(x, y, y.numel())
            return y
        if func is aten.mul_.Tensor and not kwargs and _scales_rows(*args):
            _scale_rows(*args)
            return args[0]
        if func is aten.cat.default and not kwargs and _joins_columns(*args):
            return _join_columns(args[0], self.memory)
        if func is aten.clone.default and kwargs.get("memory_format") is torch.contiguous_format and _has_rows(*args):
            return _contiguous(args[0], self.memory)
        made = func(*args, **kwargs)
        if func.overloadpacket in ALLOCATIONS:
            return self.memory.empty(made) if made.device.type == "cpu" and made.numel() else made
        if not func.is_view and func not in VIEWS:
            self.reason = self.reason or f"torch computes {func}"
        return made


def _adds_plainly(y: Tensor, x: Any) -> bool:
    same = isinstance(x, Tensor) and x.dtype == y.dtype and x.shape == y.shape
    return same and x.is_contiguous() and y.is_contiguous() and y.numel() > 0 and ops.takes(y)


def _scales_rows(y: Tensor, factor: Any) -> bool:
    """Whether each row of y, whose elements stand side by side, gets one factor."""
    if not ops.takes(y) or not y.numel() or not y[0].is_contiguous():
        return False
    if isinstance(factor, Tensor):
        per_row = factor.shape == (len(y), *[1] * (y.dim() - 1))
        return per_row and factor.dtype == torch.float32 and factor.is_contiguous()
    return isinstance(factor, int | float)


def _scale_rows(y: Tensor, factor: Tensor | float) -> None:
    factors, number = (factor, 1.0) if isinstance(factor, Tensor) else (None, float(factor))
    ops.typed("norm", "scale", y.dtype)(y, factors, len(y), y[0].numel(), y.stride(0), number)


def _joins_columns(parts: Any, axis: int = 0) -> bool:
    """Whether matrices are put side by side."""
    if axis not in (1, -1) or not all(x.dim() == 2 and x.numel() and x.stride(1) == 1 for x in parts):
        return False
    return all(ops.takes(x) and x.dtype == parts[0].dtype for x in parts)


def _join_columns(parts: list[Tensor], memory: Memory) -> Tensor:
    rows, width = len(parts[0]), sum(x.shape[1] for x in parts)
    y = memory.empty(parts[0].new_empty(rows, width))
    at, size = 0, y.itemsize
    for x in parts:
        of_both = rows, x.shape[1] * size, x.stride(0) * size, width * size
        ops.op("norm", "copy_rows")(x, y[:, at:], *of_both)
        at += x.shape[1]
    return y


def _has_rows(x: Tensor) -> bool:
    """Whether x is a matrix, or made of rows whose elements stand side by side, on two axes."""
    return ops.takes(x) and x.numel() > 0 and (x.dim() == 2 or (x.dim() == 3 and x.stride(2) == 1))


def _contiguous(x: Tensor, memory: Memory) -> Tensor:
    y = memory.empty(x.new_empty(x.shape))
    blocks = x if x.dim() == 3 else x[:, None] if x.stride(1) == 1 else x[:, :, None]
    width, block, row = (count * x.itemsize for count in (blocks.shape[2], *blocks.stride()[:2]))
    ops.op("norm", "copy_blocks")(x, y, *blocks.shape[:2], width, block, row)
    return y


class _Escapes(TorchFunctionMode):
    """Sees who takes a tensor's memory elsewhere."""

    def __init__(self, watch: _Watch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ESCAPES:
            self.watch.reason = self.watch.reason or f"something reads a tensor by {func.__name__}()"
        return func(*args, **(kwargs or {}))
