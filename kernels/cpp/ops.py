"""Calling C++ operations on CPU tensors: find one, pack its arguments, run it on this process's threads.

Every operation has the same shape (op.h), so that a list of them is data: a Recorder keeps functions and arguments
next to what is executed, and graph.py runs the list again in one call.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ... import linux_calls
from ...errors import FatalError
from . import compiler

log = logging.getLogger("phalanx")
LOOK = 3e-5  # seconds that threads look for the next operations before they sleep; as in wait.h
SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}  # of functions, by the dtype of what they compute
READ = {torch.float16: "f16", **SUFFIXES}  # likewise, by the dtype of weights that are only read
Value = Tensor | int | float | None


class Recorder(Protocol):
    """Called with every operation while it is set."""

    def add(self, function: int, arguments: bytes, tensors: list[Tensor]) -> None: ...
    def refuse(self, reason: str) -> None: ...


class _Recording(threading.local):
    recorder: Recorder | None = None  # of this thread's operations


recording = _Recording()


class Op:
    """A function of a library. Call it with what its struct in the source has, in that order."""

    def __init__(self, source: str, name: str):
        library = libraries()[source]
        self.name = name
        self.address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        self.fields = ctypes.c_int64.in_dll(library, f"{name}_fields").value

    def __call__(self, *values: Value) -> None:
        run((self, values))


Call = tuple[Op, tuple[Value, ...]]  # an operation and its arguments
Calls = tuple[Call, ...]  # in order


def run(*calls: tuple[Op, tuple[Value, ...]]) -> None:
    """Operations one after the other, by the same number of threads: one may leave each thread's part to the next."""
    packed = []
    for one, values in calls:
        assert len(values) == one.fields, f"{one.name} has {one.fields} arguments, {len(values)} were given"
        packed.append((one.address, pack(values)))
        if recording.recorder is not None:
            recording.recorder.add(*packed[-1], [x for x in values if isinstance(x, Tensor)])
    run_calls(call_array(packed), len(calls), torch.get_num_threads())


def refuse_recording(reason: str) -> None:
    """Say that the host has decided on what is computed now: it is not to be replayed."""
    if recording.recorder is not None:
        recording.recorder.refuse(reason)


class _Call(ctypes.Structure):
    _fields_ = [("run", ctypes.c_void_p), ("args", ctypes.c_char_p)]


def pack(values: tuple[Value, ...]) -> bytes:
    kinds = "".join("d" if isinstance(x, float) else "q" for x in values)
    return struct.pack(kinds, *(x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in values))


@functools.cache
def op(source: str, name: str) -> Op:
    """The operation; only if `available()`."""
    return Op(source, name)


def has(source: str, name: str) -> bool:
    """Whether the source has this operation for the instruction set."""
    return hasattr(libraries()[source], name)


def typed(source: str, name: str, dtype: torch.dtype) -> Op:
    return op(source, f"{name}_{READ[dtype]}")


@functools.cache
def libraries() -> dict[str, ctypes.CDLL]:
    """For the best instruction set that a compiler here knows, too. Raises the last one's CompileError."""
    refused = list[compiler.CompileError]()
    for isa in compiler.isas():
        try:
            found = compiler.load_all(sorted(compiler.SOURCES), isa)
        except compiler.CompileError as error:
            refused.append(error)
        else:
            for one in refused:
                log.warning("kernels are compiled for %s: %s", isa, one)
            return found
    raise refused[-1]


@functools.cache
def available() -> bool:
    """Whether there are C++ operations on this machine. Says once why not."""
    try:
        libraries()
    except compiler.CompileError as error:
        log.warning("torch computes on this CPU, up to three times slower for a sequence alone: %s", error)
        return False
    except (OSError, FatalError) as error:
        log.warning("torch computes on this CPU, as no compiled kernels can be kept or loaded here: %s", error)
        return False
    return True


def takes(x: Tensor) -> bool:
    """Whether operations compute with x's dtype, in memory that they can reach."""
    return x.device.type == "cpu" and x.dtype in SUFFIXES and available()


def reads(x: Tensor) -> bool:
    """Whether operations read all of x, as it lies in memory."""
    in_reach = x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0
    return in_reach and x.dtype in READ and available()


def call_array(calls: list[tuple[int, bytes]]) -> ctypes.Array[_Call]:
    """Functions and their arguments as pool.cpp takes them; it holds the arguments."""
    return (_Call * len(calls))(*(_Call(*call) for call in calls))


def run_calls(calls: ctypes.Array[_Call], count: int, threads: int) -> None:
    _run()(_pool(threads), calls, count)


def shared_pool() -> tuple[int, int, int]:
    """The addresses of pool_run, of pool_wake, and of a pool for one thread that computes next to this process's main
    one; 0: it computes alone."""
    pool = libraries()["pool"]
    run, wake = (ctypes.cast(one, ctypes.c_void_p).value or 0 for one in (pool.pool_run, pool.pool_wake))
    return run, wake, _pool(others()) or 0


def stay_awake(seconds: float = LOOK) -> list[float]:
    """This process's threads look so long for the next operations before they sleep, from now on. Returns how long
    those of each pool did before."""
    if not available():
        return []
    look = libraries()["pool"].pool_look
    look.argtypes, look.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    pools = _pool(torch.get_num_threads()), _pool(others())
    return [look(pool, int(seconds * 1e9)) / 1e9 for pool in pools if pool is not None]


def others() -> int:
    """Threads that compute next to this process's main one: a core stays free for what else it does, as these look for
    work, and where there are some, one more."""
    threads = min(torch.get_num_threads(), len(linux_calls.processors()))
    return threads - (2 if threads > 4 else 1)


@functools.cache
def _run() -> Callable[..., None]:
    function = libraries()["pool"].pool_run
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    return function


@functools.cache
def _pool(threads: int) -> int | None:
    """None: the caller computes alone."""
    if threads <= 1:
        return None
    make = libraries()["pool"].pool_make
    make.argtypes, make.restype = [ctypes.c_int], ctypes.c_void_p
    return make(threads)
