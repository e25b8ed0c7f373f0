"""Split-K GEMMs: how many splits, what each makes, and when they are taken."""

import pytest
import torch
from phalanx.kernels.gemm import split_k_gemm
from phalanx.kernels.gemm.cublaslt import GemmShape
from phalanx.kernels.gemm.split_k_gemm import splits

from .cublaslt import BF16, Lib, algo, plain, put

NARROW, WIDE = (3584, 18944), (37888, 3584)  # of Qwen2.5-7B: down, gate and up


@pytest.mark.parametrize(
    "rows, size, count",
    [
        (80, NARROW, 4),
        (128, NARROW, 4),
        (129, NARROW, 2),
        (256, NARROW, 2),
        (257, NARROW, 1),
        (80, WIDE, 1),
        (256, (4096, 14336), 2),
        (128, (4096, 14336), 4),
        (128, (4096, 128), 2),
        (128, (4096, 96), 1),
    ],
)
def test_each_multiprocessor_of_132_gets_a_tile(rows, size, count):
    assert splits(rows, torch.empty(size, device="meta", dtype=BF16), 132) == count


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", split_k_gemm.SPLITS)
def test_partial_sums(count, bias, monkeypatch):
    """Each split's inputs make one of their own, without a bias; rounding them costs no more than rounding the sum
    twice."""
    x, weight = plain(80, 512), plain(48, 512)
    wanted = split_k_gemm.sizes(weight, count, bias)
    assert wanted == GemmShape(BF16, 48, 512, splits=count, bias=bias)
    lib = put(Lib(), {wanted: {80: algo(1), 96: None}}, monkeypatch)
    assert split_k_gemm.partial_sums(x, weight, not bias) is None
    found = split_k_gemm.partial_sums(x, weight, bias)
    each = x.view(80, count, -1), weight.view(48, count, -1)
    assert torch.equal(found, torch.stack([x @ w.T for x, w in zip(*(one.unbind(1) for one in each), strict=True)], 1))
    assert found.is_contiguous() and lib.gemms == 1
    exact = x.double() @ weight.double().T

    def error(y):
        return (y.double() - exact).norm()

    assert error(found.float().sum(1)) < 2 * error(x @ weight.T)


def test_only_bf16_is_split():
    assert splits(80, torch.empty(NARROW, device="meta", dtype=torch.float16), 132) == 1


def test_without_a_choice_there_are_none(monkeypatch):
    """Of other rows, where split-K ones were not faster, of what the library refuses, and of what it cannot read."""
    weight = plain(48, 512)
    choices = {split_k_gemm.sizes(weight, 2): {80: algo(7), 96: None}}
    assert split_k_gemm.partial_sums(plain(80, 512), weight) is None
    lib = put(Lib(), choices, monkeypatch)
    assert all(split_k_gemm.partial_sums(plain(rows, 512), weight) is None for rows in (79, 80, 96))
    assert lib.gemms == 0
    lib = put(Lib(), {split_k_gemm.sizes(weight, 2): {80: algo(1)}}, monkeypatch)
    cut = plain(80, 1024)[:, :512]
    assert (
        split_k_gemm.partial_sums(cut, weight) is None
        and split_k_gemm.partial_sums(plain(80, 512).half(), weight) is None
    )
    assert lib.gemms == 0 and split_k_gemm.partial_sums(plain(80, 512), weight) is not None
