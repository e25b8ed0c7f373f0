"""CUDA C++ compiled where it runs: NVRTC through CuPy, cached on the node, launched through the driver.

A source in a family's folder is compiled for one element type and one set of sizes, which are constants to it, so that
loops unroll and arrays lie in registers. Binaries lie in a folder of the node's temporary directory under the hash of
all that went into them; of several ranks that want one at the same time, one compiles and the others wait.

Kernels may start before their predecessor on the stream has ended (programmatic dependent launch, from sm_90 on): each
calls `grid_wait()` of common.cuh before it writes, or reads what that predecessor wrote. Weights may be read before:
what writes them must not call `launch_dependents()` early. Behind a fence, a kernel that calls it only when it has
waited itself, as GEMMs do, so may all that is older than the fence: `settled` lists what kernels here have written
whether there was one since.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import re
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import errors, linux_calls
from . import kernel_cache
from .device import device_caps

log = logging.getLogger("phalanx")

# Every .cu and .cuh of the families' folders, by file name.
SOURCES = {path.name: path for path in sorted(Path(__file__).parent.glob("*/*.cu*"))}
# Names of element types in common.cuh.
TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "long long"}

COUNTERS = 1 << 16
_fences: defaultdict[int, int] = defaultdict(int)  # by device: how many fences have been launched
_writes: dict[int, tuple[int, int]] = {}  # by address: the device, and its fences before a kernel wrote there
_telling, _told = threading.Lock(), set[str]()  # of architectures that kernels were compiled for
COMPILERS = 8  # threads
_TWO_BYTES, _PROMOTE_128 = 1, 2  # CU_TENSOR_MAP_DATA_TYPE_UINT16, ..._L2_128B
_SWIZZLES = {64: 3, 32: 2, 16: 1}  # CU_TENSOR_MAP_SWIZZLE_128B, _64B, _32B, by elements of two bytes that lie together
_CLUSTER, _PDL = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, ..._PROGRAMMATIC_STREAM_SERIALIZATION
_LAUNCH = "@7IPPI"  # CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes, number of these
_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class TensorMap:
    """A matrix as TMA of sm_90 and later takes it: boxes of 64 elements of `height` rows, for a kernel's
    `const __grid_constant__ Map`. Rows past the end are zeros."""

    def __init__(self, start: int, rows: int, columns: int, height: int, pitch: int, runs: int = 0, run: int = 64):
        """start: address of [rows, columns] elements of 2 bytes, `pitch` from row to row; in bytes multiples of 16.

        runs: of `run` elements, 64, 32 or 16, side by side that a box has of each row, one after the other; columns are
        multiples of it. The 16-byte vectors of a run are permuted (swizzled).
        """
        self._room = (ctypes.c_char * 192)()  # a CUtensorMap has 128 bytes, from a multiple of 64 on
        self.address = -(-ctypes.addressof(self._room) // 64) * 64
        u32, u64 = ctypes.c_uint32, ctypes.c_uint64
        sizes, pitches, box = [columns, rows], [pitch * 2], [64, height]
        if runs:
            sizes, pitches, box = [run, columns // run, rows], [run * 2, pitch * 2], [run, runs, height]
        n = len(sizes)
        status = libcuda().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address), _TWO_BYTES, u32(n), ctypes.c_void_p(start), (u64 * n)(*sizes),
            (u64 * (n - 1))(*pitches), (u32 * n)(*box), (u32 * n)(*[1] * n), 0, _SWIZZLES[run], _PROMOTE_128, 0,
        )  # fmt: skip
        check(status, f"describing {rows} x {columns} elements in boxes of {height} rows")


@functools.lru_cache(4096)
def tensor_map(start: int, rows: int, columns: int, height: int, pitch: int, runs: int = 0, run: int = 64) -> TensorMap:
    """The TensorMap of these; it holds for whatever lies there."""
    return TensorMap(start, rows, columns, height, pitch, runs, run)


class Kernel:
    """A function of a module that is loaded on one device. Call it with tensors, maps, ints (C int) and floats (C
    float)."""

    def __init__(self, function: ctypes.c_void_p, name: str, overlap: bool, device: int, fence: bool):
        """overlap: it may start early, unless a launch asks for another. fence: nothing starts before all before it has
        ended."""
        self.function = function
        self.name = name
        self._overlap = overlap
        self._fence = fence or not overlap
        self._device = device
        self._attributes = functools.cache(self._make_attributes)

    def __call__(
        self,
        grid: tuple[int, int, int],
        threads: int,
        *args: Tensor | TensorMap | float,
        shared: int = 0,
        cluster: int = 1,
        overlap: bool = True,
    ) -> None:
        """Launch on torch's current stream. Empty grids are left out. Raises struct.error where an int is no C int.

        shared: bytes of dynamic shared memory. cluster: blocks of one, along the grid's x. overlap: it may start before
        what comes before has ended.
        """
        if 0 in grid:
            return
        attributes = self._attributes(cluster, overlap)
        stream = torch._C._cuda_getCurrentRawStream(self._device)  # as device.current_stream
        sizes = *grid, threads, 1, 1, shared, stream, ctypes.addressof(attributes), len(attributes)
        layout = _layout(tuple(map(type, args)))
        place = layout.fill(sizes, args)
        check(libcuda().cuLaunchKernelEx(place.launch, self.function, place.pointers, None), self.name)
        layout.free.append(place)  # the driver has copied what lies there
        if self._fence or not overlap:
            _fences[self._device] += 1

    def _make_attributes(self, cluster: int, overlap: bool) -> ctypes.Array[_Attribute]:
        """Launch attributes other than the sizes."""
        asked = [_Attribute(id=_PDL, value=(1,))] if self._overlap and overlap else []
        if cluster > 1:
            asked.append(_Attribute(id=_CLUSTER, value=(cluster, 1, 1)))
        return (_Attribute * len(asked))(*asked)


class _Place:
    """Memory from which the driver reads one launch: its sizes, then its arguments, and where each of these lies."""

    def __init__(self, size: int, offsets: list[int]):
        self.memory = ctypes.create_string_buffer(size)
        start = ctypes.addressof(self.memory)
        self.launch = ctypes.c_void_p(start)
        self.pointers = (ctypes.c_void_p * len(offsets))(*[start + offset for offset in offsets])


class _Layout:
    """How launches with arguments of these types lie in memory. Maps lie in their own.

    A ctypes object for each argument of each launch would cost the host three times as much.
    """

    def __init__(self, types: tuple[type, ...]):
        kinds = ["P" if issubclass(t, (Tensor, TensorMap)) else "f" if issubclass(t, float) else "i" for t in types]
        ends = [struct.calcsize(_LAUNCH + "".join(kinds[: i + 1])) for i in range(len(kinds))]
        self._offsets = [end - struct.calcsize(kind) for end, kind in zip(ends, kinds, strict=True)]
        self._struct = struct.Struct(_LAUNCH + "".join(kinds))
        self._tensors = [i for i, t in enumerate(types) if issubclass(t, Tensor)]
        self._maps = [i for i, t in enumerate(types) if issubclass(t, TensorMap)]
        self.free: list[_Place] = []  # threads that launch at once have a place each: `pop` and `append` are atomic

    def fill(self, sizes: tuple[int, ...], args: tuple[Any, ...]) -> _Place:
        """A free place; the caller gives it back to `free`."""
        try:
            place = self.free.pop()
        except IndexError:
            place = _Place(self._struct.size, self._offsets)
        values = list(args)
        for i in self._tensors:
            values[i] = args[i].data_ptr()
        for i in self._maps:
            values[i] = place.pointers[i] = args[i].address
        self._struct.pack_into(place.memory, 0, *sizes, *values)
        return place


_layout = functools.cache(_Layout)


Size = int | str | torch.dtype


def kernel(source: str, name: str, dtype: torch.dtype, shared: int = 0, **sizes: Size) -> Kernel:
    """Function `name` of `source`.cu for element type T = `dtype`, with `sizes` as constants, or types, or headers.

    A header's name stands where the source has `#include` and the size's.

    shared: the most dynamic shared memory, in bytes, that a launch will ask for.
    """
    return _kernel(torch._C._cuda_getDevice(), source, name, dtype, shared, **sizes)


@functools.cache
def _kernel(device: int, source: str, name: str, dtype: torch.dtype, shared: int, /, **sizes: Size) -> Kernel:
    """Sizes in another order are looked up once more: launches do not wait for a sort."""
    return _load(variant(source, dtype, **sizes), name, shared, device)


class KernelVariant(NamedTuple):
    """A source for one element type and one set of sizes, sorted by name."""

    source: str
    dtype: torch.dtype
    sizes: tuple[tuple[str, Size], ...]

    @property
    def text(self) -> str:
        return variant_text(self.source, {"T": self.dtype, **dict(self.sizes)})


def variant(source: str, dtype: torch.dtype, **sizes: Size) -> KernelVariant:
    return KernelVariant(source, dtype, tuple(sorted(sizes.items())))


def compile_ahead(programs: Iterable[KernelVariant], device: torch.device) -> None:
    """Begin to fill the node's cache with these, several at a time, while this process goes on.

    Who needs one meanwhile waits for it. What cannot be compiled is compiled again, and reported, where it is needed.
    """
    arch, left = device_caps(device).arch, deque(dict.fromkeys(programs))

    def work() -> None:
        while left:
            with contextlib.suppress(Exception):  # another thread may have taken the last one, too
                one = left.popleft()
                cached(one.source, one.text, arch)

    for _ in range(min(COMPILERS, len(linux_calls.processors()), len(left))):
        threading.Thread(target=work, name="compile", daemon=True).start()


@functools.cache
def _load(program: KernelVariant, name: str, shared: int, device: int) -> Kernel:
    found, source = device_caps(torch.device("cuda", device)), program.source
    torch.cuda.current_stream().synchronize()  # makes the device's context current in this thread
    binary = cached(source, program.text, found.arch)
    driver = libcuda()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver.cuModuleLoadData(ctypes.byref(module), binary), f"loading {source}.cu")
    check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding {name}")
    if shared > 48 << 10:
        check(driver.cuFuncSetAttribute(function, _MAX_SHARED, shared), name)
    return Kernel(function, name, found.has_pdl, device, is_fence(program.text, name))


def is_fence(text: str, name: str) -> bool:
    """Whether kernel `name` of a program lets its successor start no sooner than it has passed `grid_wait()` itself."""
    text = re.sub(r"//.*", "", text.removeprefix(SOURCES["common.cuh"].read_text()))
    _, _, body = re.split(rf'(extern "C" __global__[^;{{]*?\b{name}\()', text, maxsplit=1)
    body, _, _ = body.partition('extern "C"')
    for part in (body, text):  # functions that it calls may do it for it
        wait, release = part.find("grid_wait();"), part.find("launch_dependents();")
        if release >= 0:
            return 0 <= wait < release
    return True


def fence(device: torch.device) -> None:
    """A kernel of someone else's has been launched there, which starts when all before it has ended."""
    _fences[device.index or 0] += 1


def written(device: torch.device, *tensors: Tensor) -> None:
    """A kernel has been launched on this device that writes these."""
    count = device.index or 0
    _writes.update((x.data_ptr(), (count, _fences[count])) for x in tensors)


def settled(*tensors: Tensor) -> bool:
    """Whether a kernel that is launched now may read these before it passes `grid_wait()`: there was a fence behind the
    kernel that wrote them, if one of those here did. Copies are waited for."""
    found = (_writes.get(x.data_ptr()) for x in tensors)
    return all(one is None or _fences[one[0]] > one[1] for one in found)


def cached(name: str, text: str, arch: str) -> bytes:
    """The binary of a program, compiled if it is not in this node's cache."""
    key = hashlib.sha256(f"{arch} {text}".encode()).hexdigest()[:32]
    folder = kernel_cache.cache_folder()
    file = folder / f"{name}-{key}.cubin"
    if not file.exists():
        with kernel_cache.locked(folder / f"{key}.lock"):
            if not file.exists():  # another rank may have been faster
                _say_that_it_compiles(arch)
                kernel_cache.atomic_write(file, compile_text(name, text, arch))
    return file.read_bytes()


def _say_that_it_compiles(arch: str) -> None:
    """Once, whichever thread is the first: a model's first start on a node takes up to a minute for it."""
    with _telling:
        if arch not in _told:
            _told.add(arch)
            log.info("compiling kernels for %s; the next start on this machine finds them", arch)


def variant_text(source: str, sizes: Mapping[str, Size]) -> str:
    """common.cuh, the sizes, the source and what it includes as one text: the compiler needs no include path."""
    given = [
        f"constexpr int {name} = {value};\n" if isinstance(value, int) else f"typedef {TYPES[value]} {name};\n"
        for name, value in sizes.items()
        if not isinstance(value, str)
    ]
    text = SOURCES[f"{source}.cu"].read_text()
    for name, value in sizes.items():
        if isinstance(value, str):
            text = text.replace(f"#include {name}\n", f'#include "{value}.cuh"\n')
    return "".join([SOURCES["common.cuh"].read_text(), *given, _included(text)])


def _included(text: str) -> str:
    """With the headers in place of the lines that name them, and theirs in them."""
    return re.sub(r'#include "(.*)"', lambda line: _included(SOURCES[line[1]].read_text()), text)


def compile_text(name: str, text: str, arch: str) -> bytes:
    """Raises FatalError with the compiler's words."""
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise errors.FatalError(
            f"kernels are compiled with CuPy ({error}): `make install TORCH=cuda`, or `pip install phalanx[gpu]`",
            errors.USAGE,
        ) from None
    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={arch}", "-std=c++17"))
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        program_log = nvrtc.getProgramLog(program)
        raise errors.FatalError(f"NVRTC could not compile {name}.cu for {arch}: {error}\n{program_log}", 1) from None
    finally:
        nvrtc.destroyProgram(program)


@functools.cache
def libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def check(status: int, what: str) -> None:
    """Raises RuntimeError with the driver's words where a call's status is an error."""
    if status:
        text = ctypes.c_char_p()
        libcuda().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {status} in {what}: {(text.value or b'?').decode()}")


def vector(x: Tensor, *lengths: int, most: int = 16) -> int:
    """How many elements of x fit in one access of at most `most` bytes when rows and strides have these lengths."""
    return common_vector((x,), *lengths, most=most)


def common_vector(tensors: Sequence[Tensor], *lengths: int, most: int = 16) -> int:
    """The vector width common to these tensors of one dtype."""
    size, all_bits = tensors[0].element_size(), most
    for x in tensors:
        all_bits |= x.data_ptr()
    for length in lengths:
        all_bits |= length * size
    return max((all_bits & -all_bits) // size, 1)  # the lowest bit: the largest power of two that divides all


def plain(*tensors: Tensor) -> bool:
    """Whether all are contiguous and begin where accesses of 16 bytes, and TMA's boxes, may."""
    return all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in tensors)


@functools.cache
def counters(device: torch.device, stream: int) -> Tensor:
    """[COUNTERS] int32 that are zero between kernels: who counts there which of its blocks is the last clears them.

    Of one stream, as kernels that run at once must not share them. Graphs keep their address, so they are made by a
    call before the capture and stay.
    """
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
