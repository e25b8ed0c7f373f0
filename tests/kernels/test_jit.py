"""Arguments that a launch gives to the driver, and the kernel that a lookup finds."""

import ctypes
import itertools
import struct
import threading
from types import SimpleNamespace

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.device import current_stream

from .programs import PROGRAMS

DEVICE, STREAM, FUNCTION = 3, 0x7F0123456780, 0x7F0000000123


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(jit._Attribute)),
        ("count", ctypes.c_uint),
    ]


class Driver:
    """Stands for libcuda: reads a launch as the driver does."""

    def __init__(self, kinds):
        """kinds: of the kernel's parameters, in the order of the launches."""
        self.kinds, self.launches, self.status = iter(kinds), [], 0

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        assert function.value == FUNCTION and extra is None
        found = Config.from_address(config.value)
        asked = [(one.id, one.value[:3]) for one in found.attributes[: found.count]]
        sizes = [getattr(found, name) for name, *_ in Config._fields_[:8]]
        values = [bytes(read(at, kind)) for at, kind in zip(parameters, next(self.kinds), strict=True)]
        self.launches.append((sizes, asked, values))
        return self.status

    def cuGetErrorString(self, status, text):
        text._obj.value = b"no luck"


def read(address, kind):
    return (ctypes.c_char * ctypes.sizeof(kind)).from_address(address)


@pytest.fixture
def launch(monkeypatch):
    """A kernel, and the driver that it is launched by."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + device, raising=False)

    def made(*kinds, overlap=True, fence=False):
        driver = Driver(itertools.repeat(kinds))
        monkeypatch.setattr(jit, "libcuda", lambda: driver)
        return jit.Kernel(ctypes.c_void_p(FUNCTION), "some", overlap, DEVICE, fence), driver

    return made


def tensor_map(byte):
    """One that was not described by the driver."""
    found = jit.TensorMap.__new__(jit.TensorMap)
    found._room = (ctypes.c_char * 192)(*[byte] * 192)
    found.address = -(-ctypes.addressof(found._room) // 64) * 64
    return found


P, INT, FLOAT, MAP = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_char * 128


def test_arguments_lie_where_the_driver_reads_them(launch):
    """Arguments as C has them, in any order, after other values of the same types and after other types."""
    kinds = INT, MAP, P, FLOAT, P, INT, INT, MAP, FLOAT
    kernel, driver = launch(*kinds)
    for n in range(3):
        x, weight, maps = torch.zeros(4), torch.nn.Parameter(torch.zeros(2)), [tensor_map(n), tensor_map(n + 1)]
        args = n, maps[0], x, 0.5 + n, weight, -7, True, maps[1], float("-inf")
        kernel((2, 3, 4), 96, *args, shared=1000 + n)
        want = [getattr(a, "data_ptr", lambda a=a: a)() for a in args]
        found = driver.launches[-1]
        assert found[0] == [2, 3, 4, 96, 1, 1, 1000 + n, STREAM + DEVICE]
        for kind, value, got in zip(kinds, want, found[2], strict=True):
            assert got == (bytes([n if value is maps[0] else n + 1]) * 128 if kind is MAP else bytes(kind(value)))
    kernel, driver = launch(FLOAT, INT)
    kernel((1, 1, 1), 32, 2.0, 5)
    assert driver.launches[-1][2] == [bytes(FLOAT(2)), bytes(INT(5))]
    kernel, driver = launch()
    kernel((1, 1, 1), 32)
    assert driver.launches[-1][2] == []


def test_what_a_launch_asks_for(launch):
    cluster, overlap = (4, [2, 1, 1]), (6, [1, 0, 0])
    for able, size, asked in (
        (True, 2, [overlap, cluster]),
        (True, 1, [overlap]),
        (False, 2, [cluster]),
        (False, 1, []),
    ):
        kernel, driver = launch(INT, overlap=able)
        kernel((2, 1, 1), 32, 5, cluster=size)
        kernel((0, 1, 1), 32, 5, cluster=size)
        assert [one[1] for one in driver.launches] == [asked]  # an empty grid is left out


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1])
def test_an_int_that_c_does_not_hold(launch, value):
    kernel, driver = launch(INT)
    with pytest.raises(struct.error):
        kernel((1, 1, 1), 32, value)
    kernel((1, 1, 1), 32, (1 << 31) - 1)
    assert driver.launches[0][2] == [bytes(INT((1 << 31) - 1))]


def test_a_launch_that_fails(launch):
    kernel, driver = launch(INT)
    driver.status = 700
    with pytest.raises(RuntimeError, match="error 700 in some"):
        kernel((1, 1, 1), 32, 1)
    driver.status = 0
    kernel((1, 1, 1), 32, 2)
    assert driver.launches[-1][2] == [bytes(INT(2))]


def test_threads_that_launch_at_once(monkeypatch, launch):
    """Each has a place of its own until the driver has read it."""
    kernel, _ = launch(INT)
    inside, seen = threading.Barrier(4, timeout=30), []

    def cuLaunchKernelEx(config, function, parameters, extra):
        inside.wait()  # all four have filled their places
        found = Config.from_address(config.value).gx, INT.from_address(parameters[0]).value
        inside.wait()
        seen.append(found)
        return 0

    monkeypatch.setattr(jit, "libcuda", lambda: SimpleNamespace(cuLaunchKernelEx=cuLaunchKernelEx))

    def work(number):
        for turn in range(5):
            kernel((number, 1, 1), 32, 10 * number + turn)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(seen) == sorted((number, 10 * number + turn) for number in range(1, 5) for turn in range(5))


def test_a_lookup_finds_the_same_kernel_whatever_the_order(monkeypatch):
    loaded, device = [], 0

    def load(*asked):
        if asked not in loaded:
            loaded.append(asked)
        return loaded.index(asked)

    monkeypatch.setattr(jit, "_load", load)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: device, raising=False)
    jit._kernel.cache_clear()
    bf16, f16 = torch.bfloat16, torch.float16
    asked = [
        lambda: jit.kernel("norm", "rms_norm", bf16, N=64, V=8),
        lambda: jit.kernel("norm", "rms_norm", bf16, V=8, N=64),
        lambda: jit.kernel("norm", "rms_norm", bf16, V=64, N=8),
        lambda: jit.kernel("norm", "rms_norm", bf16, 100, N=64, V=8),
        lambda: jit.kernel("norm", "add_rms_norm", bf16, N=64, V=8),
        lambda: jit.kernel("norm", "rms_norm", f16, N=64, V=8),
    ]
    try:
        assert [one() for one in asked * 2] == [0, 0, 1, 2, 3, 4] * 2
        device = 1
        assert asked[1]() == asked[0]() == 5 and loaded[5][0] == loaded[0][0] and loaded[5][3] == 1
    finally:
        jit._kernel.cache_clear()


@pytest.mark.parametrize(
    "dtype, most", [(torch.bfloat16, 16), (torch.float32, 16), (torch.bfloat16, 4), (torch.int8, 16)]
)
def test_elements_of_one_access(dtype, most):
    memory = torch.zeros(256, dtype=dtype)
    size = dtype.itemsize
    first = -memory.data_ptr() % 16 // size
    for skip, lengths in itertools.product(range(17), ([], [64], [24, 64], [4], [6, 0], [5])):
        x = memory[first + skip :]
        fits = (n for n in (16, 8, 4, 2, 1) if n * size <= most)
        able = (n for n in fits if x.data_ptr() % (n * size) == 0 and all(length % n == 0 for length in lengths))
        assert jit.vector(x, *lengths, most=most) == (found := next(able))
        for others in ([memory[first:]], [memory[first + 8 :], memory[first + 2 :]]):
            least = min(jit.vector(y, *lengths, most=most) for y in others)
            assert jit.common_vector([x, *others], *lengths, most=most) == min(found, least)


def test_the_current_stream(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: DEVICE, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + device, raising=False)
    assert current_stream() == STREAM + DEVICE


@pytest.mark.parametrize("behind", ["kernel", "fence", "waits", "asked to wait", "library"])
def test_what_may_be_read_early(behind, launch, monkeypatch):
    """Data that a kernel wrote may be read early once one has been launched behind it that starts nothing before all
    before it has ended."""
    monkeypatch.setattr(jit, "_fences", jit.defaultdict(int))
    monkeypatch.setattr(jit, "_writes", {})
    lengths, tables, copied = torch.zeros(3, 4).unbind()
    device = torch.device("cuda", DEVICE)
    assert jit.settled(lengths, tables, copied)
    jit.written(device, lengths, tables)
    assert not jit.settled(lengths) and not jit.settled(copied, tables) and jit.settled(copied)
    kernel, _ = launch(overlap=behind != "waits", fence=behind == "fence")
    if behind == "library":
        jit.fence(device)
    else:
        kernel((1, 1, 1), 32, overlap=behind != "asked to wait")
    assert jit.settled(lengths, tables) is (behind != "kernel")
    jit.written(device, tables)
    assert not jit.settled(lengths, tables)


def test_a_launch_may_be_asked_to_wait(launch):
    kernel, driver = launch()
    kernel((1, 1, 1), 32)
    kernel((1, 1, 1), 32, overlap=False)
    assert [bool(asked) for _, asked, _ in driver.launches] == [True, False]


FENCES = {
    ("gemv", "gemv"), ("pipelined_gemm", "pipelined_gemm"), ("mla_decode", "mla_decode"),
    ("quantized_gemm", "quantized_gemm"), ("expert_gemv", "expert_up"),
}  # fmt: skip
OTHERS = {("norm", "rms_norm"), ("embedding", "embed"), ("decode", "decode"), ("decode_inputs", "decode_inputs")}


def test_which_kernels_are_fences():
    """Fences are found by the order of grid_wait() and launch_dependents() in their sources, or in what these call."""
    programs = {source: jit.variant_text(source, sizes) for source, sizes in reversed(PROGRAMS)}
    for source, name in FENCES | OTHERS:
        assert jit.is_fence(programs[source], name) is ((source, name) in FENCES), name
    assert jit.is_fence('extern "C" __global__ void f(int x) { grid_wait(); }', "f")
    assert not jit.is_fence('extern "C" __global__ void f() { launch_dependents(); grid_wait(); }', "f")
