"""GEMMs of many rows: which rows a choice serves, what goes to the library, and which library that is."""

from types import SimpleNamespace

import pytest
import torch
from phalanx.kernels.gemm import cublaslt
from phalanx.kernels.gemm.cublaslt import nearest

from .cublaslt import SIZES, Lib, algo, check, plain, put


@pytest.mark.parametrize(
    "rows, count",
    [(0, 0), (1, 0), (60, 0), (61, 80), (80, 80), (81, 96), (96, 96), (97, 0), (385, 512), (512, 512), (513, 0)],
)
def test_near_counts_serve_a_few_rows(rows, count):
    assert nearest(rows, [512, 96, 80]) == count and nearest(rows, []) == 0


def test_chosen_gemms_go_to_the_library(monkeypatch):
    lib = put(Lib(), {SIZES: {80: algo(1), 96: None}}, monkeypatch)
    weight = plain(48, 32)
    for rows, gemms in ((80, 1), (61, 2), (70, 3), (60, 3), (0, 3), (81, 3), (96, 3), (97, 3)):
        check(plain(rows, 32), weight)
        assert {what[2] for what in lib.made.values() if what[1:2] == (48,)} == {80}, "counts between are filled up"
        assert lib.gemms == gemms, rows
    # CUBLAS_COMPUTE_32F and CUDA_R_32F; TRANSA = T; MAX_WORKSPACE_BYTES, REDUCTION_SCHEME_MASK = COMPUTE_TYPE.
    assert lib.attributes == [
        ("matmul", 68, 0, 3, 1, 4),
        ("wishes", 1, 32 << 20, 8),
        ("wishes", 3, 2, 4),
    ]
    assert {what[0] for what in lib.made.values() if len(what) == 4 and what[0] != "matmul"} == {14}  # CUDA_R_16BF


def test_what_the_library_does_not_take_stays_with_torch(monkeypatch):
    lib = put(Lib(works=(0,)), {SIZES: {80: algo(0), 160: algo(1)}}, monkeypatch)
    weight = plain(48, 32)
    check(plain(80, 32), weight)
    assert lib.gemms == 1
    check(plain(160, 32), weight)  # refused when called
    check(plain(80, 64)[:, :32], weight)  # rows with gaps
    check(plain(81, 32).view(-1)[1 : 1 + 80 * 32].view(80, 32), weight)  # an odd address
    check(plain(80, 48), plain(16, 48))  # sizes that nothing was chosen for
    check(plain(80, 32, torch.float16), plain(48, 32, torch.float16))
    check(plain(80, 32, torch.float32), plain(48, 32, torch.float32))
    assert lib.gemms == 1


def test_nothing_is_chosen_on_other_devices():
    assert not cublaslt.in_use
    x, weight = torch.randn(80, 32), torch.randn(48, 32)
    assert torch.equal(cublaslt.linear(x, weight), torch.nn.functional.linear(x, weight))


def test_rows_are_filled_up_to_a_measured_count_for_torch_too(monkeypatch):
    """Whatever is chosen: the library has a kernel for nearly every count, and each is loaded on its first use."""
    put(Lib(), {SIZES: {80: None}}, monkeypatch)
    found, linear = [], cublaslt.torch_linear
    monkeypatch.setattr(cublaslt, "torch_linear", lambda x, weight: found.append(len(x)) or linear(x, weight))
    x, weight = plain(70, 32), plain(48, 32)
    y = cublaslt.linear(x, weight)
    assert found == [80] and y.is_contiguous() and torch.equal(y, x @ weight.T)


def test_a_library_that_lacks_a_function(monkeypatch):
    monkeypatch.setattr(cublaslt.ctypes, "CDLL", lambda path: SimpleNamespace(cublasLtGetVersion=SimpleNamespace()))
    monkeypatch.setattr(cublaslt.Path, "read_text", lambda path: MAPS)
    with pytest.raises(OSError, match="cublasLtCreate"):
        cublaslt.load.__wrapped__()


MAPS = """\
7f00-7f01 r--p 00000000 08:01 99                         /usr/lib/libc.so.6
7f02-7f03 r-xp 00000000 08:01 12                         /opt/my env/nvidia/cu13/lib/libcublasLt.so.13
7f04-7f05 r--p 00000000 08:01 12                         /opt/my env/nvidia/cu13/lib/libcublasLt.so.13
"""


@pytest.mark.parametrize(
    "line, path",
    [
        (MAPS, "/opt/my env/nvidia/cu13/lib/libcublasLt.so.13"),
        ("7f r--p 0 08:01 5   /usr/local/lib/libcublasLt.so.12.8.4.1\n", "/usr/local/lib/libcublasLt.so.12.8.4.1"),
        ("7f r--p 0 08:01 5   /usr/local/lib/libcublasLt.so.11\n", None),
        ("7f r--p 0 08:01 5   /usr/local/lib/libcublas.so.12\n", None),
        ("7f r--p 0 08:01 5   /usr/local/lib/libcublasLt.so.13 (deleted)\n", None),
    ],
)
def test_the_library_that_torch_has_loaded(line, path):
    found = cublaslt._PATH.search(line)
    assert (found and found[0]) == path
