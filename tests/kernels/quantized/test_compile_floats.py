"""Triton's kernels for weights of 8 and 4 bits compile for every supported generation, also where no GPU is."""

import pytest
import torch
from phalanx.kernels.quantized.floats import Floats

from ..test_compile import TRITON, Recorder, checked, compile_launch

# dtype, rows, outputs, inputs, inputs of a scale, whether with a bias
CASES = [
    (torch.bfloat16, 1, 4096, 4096, 128, False),
    (torch.float16, 40, 100, 14336, 64, True),
    (torch.bfloat16, 17, 33, 300, 300, True),
]


@pytest.mark.parametrize("dtype, rows, outputs, inputs, unit, biased, arch", checked(CASES, TRITON))
def test_linear_compiles(dtype, rows, outputs, inputs, unit, biased, arch, monkeypatch):
    pytest.importorskip("triton")
    from phalanx.kernels.quantized import floats_triton

    weight = Floats(torch.empty(outputs, inputs, dtype=torch.uint8), torch.empty(outputs, inputs // unit))
    x, bias = torch.empty(rows, inputs, dtype=dtype), torch.empty(outputs, dtype=dtype) if biased else None
    for kernel, call in (
        ("linear_kernel", lambda: floats_triton.linear(x, weight, bias)),
        ("dequantize_kernel", lambda: floats_triton.dequantize(weight, dtype)),
    ):
        launches = Recorder()
        with monkeypatch.context() as patch:
            patch.setattr(floats_triton, kernel, launches)
            call()
        compiled = compile_launch(getattr(floats_triton, kernel), *launches.found[0], arch)
        assert compiled.metadata.shared <= (227 if arch >= 90 else 163) << 10
