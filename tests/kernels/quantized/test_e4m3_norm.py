"""RMS norms in e4m3, thread by thread on a CPU: they are what linears would make of the norms."""

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.norm import norm
from phalanx.kernels.quantized import e4m3_rows

from .. import cuda_model


@pytest.fixture
def launched(monkeypatch, cuda_models):
    """Kernels run in the model; new tensors hold NaN."""

    def kernel(source, name, dtype, shared=0, **sizes):
        library = cuda_models.build(source, {"T": dtype, **sizes}, name)
        return lambda grid, threads, *args: cuda_model.launch(library, grid, threads, args, args[0], seed=grid[0])

    monkeypatch.setattr(jit, "kernel", kernel)
    cuda_model.poison_new_tensors(monkeypatch)


@pytest.mark.parametrize(
    "rows, terms, size, more, dtype",
    [
        (3, 1, 256, "", torch.bfloat16),
        (2, 1, 5120, "", torch.float16),
        (3, 4, 384, "rows", torch.bfloat16),
        (3, 2, 384, "bias", torch.bfloat16),
    ],
)
def test_codes_are_those_of_the_norm(launched, rows, terms, size, more, dtype):
    """Threads have one vector, or two, or some of them none."""
    torch.manual_seed(size)
    given, (residual, other) = torch.randn(rows, terms, size).to(dtype), torch.randn(2, rows, size).to(dtype)
    given[-1], residual[-1], other[-1] = 0, 0, 0
    weight, added = torch.randn(size).to(dtype), {"": None, "rows": other, "bias": other[0]}[more]
    if more == "bias":
        given[-1, 0], residual[-1] = -added, 0
    want, stream = norm.sum_add_rms_norm_cuda(given, residual.clone(), weight, 1e-5, added)
    made = given.float().sum(1).to(dtype)
    assert torch.equal(stream, residual + (made + added if more else made))
    torch.testing.assert_close(want, norm.rms_norm_reference(stream, weight, 1e-5))
    found, total = e4m3_rows.sum_add_rms_norm(given, residual, weight, 1e-5, added)
    codes, scales = e4m3_rows.encode_reference(want)
    assert total is residual and torch.equal(total, stream) and found.dtype == dtype
    assert torch.equal(found.codes[:-1], codes[:-1]) and torch.equal(found.scales, scales)
    assert not (found.codes[-1] & 0x7F).any(), "zeros have signs"
