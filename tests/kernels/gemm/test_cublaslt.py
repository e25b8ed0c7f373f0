"""GEMMs of many rows: which rows a choice serves, what goes to the library, and which library that is."""

from types import SimpleNamespace

import pytest
import torch
from phalanx.kernels.gemm import cublaslt
from phalanx.kernels.gemm.cublaslt import nearest

from .cublaslt import SIZES, Lib, algo, check, near, plain, put

BIASED = SIZES._replace(bias=True)


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
        assert {what[2] for what in lib.made.values() if what[1:2] == (48,)} == {80}  # counts between are filled up
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
    """Rows are filled up whatever is chosen: the library has a kernel for nearly every count, and each is loaded on its
    first use."""
    put(Lib(), {SIZES: {80: None}}, monkeypatch)
    found, linear = [], cublaslt.torch_linear
    monkeypatch.setattr(cublaslt, "torch_linear", lambda x, *of: found.append(len(x)) or linear(x, *of))
    x, weight, (bias,) = plain(70, 32), plain(48, 32), plain(1, 48)
    y = cublaslt.linear(x, weight)
    assert found == [80] and y.is_contiguous() and torch.equal(y, x @ weight.T)
    put(Lib(), {BIASED: {96: None}}, monkeypatch)
    near(cublaslt.linear(x, weight), x, weight, torch.zeros(48))
    near(cublaslt.linear(plain(75, 32), weight, bias)[:0], x[:0], weight, bias)
    assert found == [80, 70, 96]


def test_other_choices_take_the_place_of_what_was_planned(monkeypatch):
    lib, x, weight = put(Lib(), {}, monkeypatch), plain(80, 32), plain(48, 32)
    for choices, seen in (({80: algo(1)}, [1]), ({80: None}, []), ({96: algo(2)}, [2]), ({}, [])):
        cublaslt.in_use[x.device].choose({SIZES: choices})
        for _ in range(2):
            lib.seen.clear()
            near(cublaslt.linear(x, weight), x, weight, torch.zeros(48))
            assert [algorithm for algorithm, _ in lib.seen] == seen


def test_the_library_adds_biases(monkeypatch):
    """GEMMs with biases have choices of their own; what reads one in a GEMM is not what another GEMM reads."""
    lib = put(Lib(), {SIZES: {80: algo(1)}, BIASED: {80: algo(2), 96: None}}, monkeypatch)
    weight, (first,), (second,) = plain(48, 32), plain(1, 48), plain(1, 48)
    for rows, bias, seen in ((80, first, [2]), (70, second, [2]), (80, None, [1]), (80, first, [2]), (90, first, [])):
        x = plain(rows, 32)
        near(cublaslt.linear(x, weight, bias), x, weight, torch.zeros(48) if bias is None else bias)
        assert [algorithm for algorithm, _ in lib.seen] == seen
        lib.seen.clear()
    given = [what[3:] for what in lib.attributes if what[0] == "matmul"]
    pointers = [(8, bias.data_ptr(), 8) for bias in (first, second, first)]
    # TRANSA = T, twice; EPILOGUE = BIAS; BIAS_POINTER.
    assert given == [(3, 1, 4), (3, 1, 4), (7, 4, 4), (8, cublaslt.ALIGNED, 8), *pointers]


def test_biases_that_the_library_does_not_read_stay_with_torch(monkeypatch):
    lib = put(Lib(), {SIZES: {80: algo(1)}, BIASED: {80: algo(1)}}, monkeypatch)
    x, weight, wide = plain(80, 32), plain(48, 32), plain(2, 48).view(-1)
    for bias in (wide[1:49], wide[::2]):
        near(cublaslt.linear(x, weight, bias), x, weight, bias)
    assert cublaslt.library_for(x, weight, wide[:48].float()) is None and lib.gemms == 0


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
