"""The host's part of small-batch steps with a GPU: host_service.cpp, which serves layer after layer.

A thread of C++ serves captured steps whole, while Python launches what comes next. Elsewhere the caller has each layer
chosen, as what the GPU does then is launched one by one, and the thread computes meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cpp import ops
from .host_choice import Choice
from .host_experts import Round

LIMIT = 300.0  # seconds that either side waits for the other: a job may be suspended, but nothing waits for ever
LATE = {  # what stands behind the count of the layers that are computed
    1: "the CPU's part of a step with experts in host memory has failed before",
    2: f"a kernel has waited {LIMIT:.0f} s for the CPU's part of a step with experts in host memory",
    3: f"the CPU has waited {LIMIT:.0f} s for a GPU's part of a step with experts in host memory",
}
PAUSE = 0.2  # seconds between two looks at whether the GPU still works
ALONE = 4  # tokens whose rows one thread brings together sooner than all begin to
PLACED = 2  # of `HostRouted.all_calls`: routed tokens get their places, and rows are brought there
FEW_NUMBERS = 8192  # of routed rows: one thread prepares them, and adds up their sums, sooner than all begin to
# Copies of a layer: none ever; copies serve the step; or they are for later steps, and the CPU computes these, too.
NO_COPIES, COPIES, COPIES_TO_STAY = 0, 1, 2
TIMES = "wait", "choose", "cpu"  # nanoseconds in Service.totals, and behind them experts:
SERVED = "resident", "cpu", "streamed", "loaded"


class Layer(NamedTuple):
    """The host's work for a layer with so many tokens."""

    packed: bytes
    held: tuple[Any, ...]  # what it points to


class Step(NamedTuple):
    """Layers in the order in which the GPU sends them."""

    packed: ctypes.Array[ctypes.c_char]
    size: int
    layers: tuple[Layer, ...]


def layer(
    choice: Choice, choose: tuple[int, bytes], lag: Tensor, work: Round, made: Tensor, copies: int, *held: Any
) -> Layer:
    """choose: of `Choice.call`, with this lag, which is learnt. work: `HostRouted.all_calls` of the choice's experts.
    made: [T, H], what they fill. copies: what they are for. held: what all of them point to."""
    args, calls = ctypes.create_string_buffer(choose[1]), work.packed
    _, _, copied, adopted, found = (one.data_ptr() for one in choice.results)
    where = choose[0], ctypes.addressof(args), found, copied, adopted, ctypes.addressof(calls), len(calls)
    alone = PLACED if len(made) <= ALONE else 0
    counts = alone, FEW_NUMBERS // made.shape[1], work.before, made.data_ptr(), made.nbytes, copies
    packed = struct.pack("14qd", *where, *counts, lag.data_ptr(), choice.costs.copy)
    return Layer(packed, (choice, args, lag, work, made, *held))


def step(layers: Sequence[Layer]) -> Step:
    packed = b"".join(one.packed for one in layers)
    return Step(ctypes.create_string_buffer(packed, len(packed)), len(layers), tuple(layers))


class Service:
    """The service thread of one rank with a GPU."""

    def __init__(self, sent: Tensor, made: Tensor, experts: Tensor):
        """int32, pinned: what counts the layers whose tokens are here, and behind it the latest one of which the GPU's
        copies took longer than the CPU; what counts those that are computed, and behind it why no more will be (LATE);
        and the list of experts that are copied."""
        self._sent, self._made = sent, made
        self.totals = torch.zeros(len(TIMES) + len(SERVED), dtype=torch.int64)
        self._given_up = torch.zeros(1, dtype=torch.int64)
        packed = struct.pack(
            "9q", sent.data_ptr(), made.data_ptr(), experts.data_ptr(), *ops.shared_pool(), self._given_up.data_ptr(),
            int(LIMIT * 1e9), self.totals.data_ptr(),
        )  # fmt: skip
        self._shared, self._held = ctypes.create_string_buffer(packed, len(packed)), experts
        self._count = 0  # of layers
        self._thread: int | None = None
        self._posted: list[Step | Layer] = []  # the last ones, which must stay until they are done

    def post(self, one: Step) -> None:
        """Serve a step that is launched. Raises what went wrong before."""
        self._look()
        self._post(one, one.packed, one.size, self._next(one.size), 0)

    def drain(self) -> None:
        """Until all that was posted is done."""
        while self._thread is not None and not _library().service_drain(self._thread, int(PAUSE * 1e9)):
            self._check()

    def choose(self, one: Layer) -> None:
        """Wait for the tokens of the `send` that was launched, and choose."""
        self.drain()
        self._look()
        first = self._next(1)
        while not _library().service_choose(self._shared, one.packed, first, int(PAUSE * 1e9)):
            self._look()
            self._check()

    def compute(self, one: Layer) -> None:
        """Let the CPU compute the chosen, while the caller launches the GPU's part."""
        self._post(one, one.packed, 1, self._count, 1)

    def _post(self, one: Step | Layer, *call: Any) -> None:
        if self._thread is None:
            self._thread = _library().service_make(self._shared)
            if not self._thread:
                raise RuntimeError("no thread can be had for experts in host memory")
        self._posted = [*self._posted[-16:], one]
        _library().service_post(self._thread, *call)

    def give_up(self) -> None:
        """Nobody serves any more: the GPU, and who serves, wait for nothing."""
        self._made[1] = self._made[1] or 1
        self._given_up[0] = 1

    def __del__(self) -> None:  # the thread reads memory of this object
        with contextlib.suppress(Exception):
            if self._thread is not None:
                self._given_up[0] = 1
                while not _library().service_drain(self._thread, int(PAUSE * 1e9)):
                    pass
                _library().service_post(self._thread, None, 0, 0, 0)

    def _next(self, layers: int) -> int:
        """The count of the first of these."""
        first = self._count + 1 & 0xFFFFFFFF
        self._count = self._count + layers & 0xFFFFFFFF
        return first

    def _look(self) -> None:
        if late := int(self._made[1]):
            raise RuntimeError(LATE[late])

    def _check(self) -> None:
        """Raises the error that the GPU has reported. What was sent since the last look counts."""
        if torch.cuda.current_stream().query() and int(self._sent[0]) & 0xFFFFFFFF != self._count:
            raise RuntimeError("the GPU has done all that was launched, but sent nothing to the host")


@functools.cache
def _library() -> ctypes.CDLL:
    library = ops.libraries()["host_service"]
    pointer, u32, i64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int64
    kinds: dict[str, tuple[list[Any], Any]] = {
        "service_make": ([pointer], pointer),
        "service_post": ([pointer, pointer, i64, u32, ctypes.c_int], None),
        "service_drain": ([pointer, i64], ctypes.c_int),
        "service_choose": ([pointer, pointer, u32, i64], ctypes.c_int),
    }
    for name, (arguments, result) in kinds.items():
        function: Callable[..., Any] = getattr(library, name)
        function.argtypes, function.restype = arguments, result  # type: ignore[attr-defined]
    return library
