"""Triton's GEMMs with weights in 8 and 4 bits, beside the reference, in its interpreter.

Without a GPU: TRITON_INTERPRET=1 python -m phalanx.tests.kernels.quantized.floats_cases
"""

from __future__ import annotations

import torch
from phalanx.kernels.device import device_caps
from phalanx.kernels.quantized import e4m3_wgmma, floats
from phalanx.kernels.quantized.floats import Floats
from torch import Tensor

from ..attention.decoding import mend_interpreter

# outputs, inputs, inputs of a scale; of pairs where it is 32 and more follow.
SIZES = [(48, 128, 128), (70, 200, 8), (33, 300, 300), (16, 1200, 4), (100, 256, 64)]


def make(outputs: int, inputs: int, unit: int, pairs: bool = False, seed: int = 0) -> Floats:
    """Random codes, all that are numbers; the same ones for the same arguments."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs // 2 if pairs else inputs), dtype=torch.uint8, generator=draw)
    scales = outputs, inputs // unit
    if pairs:
        return floats.pack(codes, torch.randint(1, 140, scales, dtype=torch.uint8, generator=draw))
    codes[(codes & 0x7F) == 0x7F] = 0
    return floats.pack(codes, torch.rand(scales, generator=draw) / 448)


def rounded(x: Tensor) -> Tensor:
    """x [T, I] in e4m3 with a scale for each row, in f64."""
    most = x.float().abs().amax(1, keepdim=True)
    codes = torch.where(most > 0, x.float() * (torch.full_like(most, 448) / most), 0).to(torch.float8_e4m3fn).double()
    return codes * (most.double() / 448)


def as_multiplied(x: Tensor, packed: object) -> Tensor:
    """x [T, I] as a GPU multiplies it with these weights, in f64: rounded where tensor cores of 8 bits do it."""
    return rounded(x) if e4m3_wgmma.chosen(len(x), packed, device_caps(x.device)) else x.double()


def main() -> None:
    from phalanx.kernels.quantized import floats_triton

    mend_interpreter()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # which fills fresh memory with NaN
    packs = [make(*sizes) for sizes in SIZES] + [make(40, 96, 32, True), make(33, 1216, 32, True)]
    for i, packed in enumerate(packs):
        dtype = [torch.float32, torch.float16][i % 2]
        want = floats.dequantize(packed, dtype)
        assert torch.equal(floats_triton.dequantize(packed, dtype), want)
        if packed.pairs:  # numbers near one, as sums of others tell little
            packed = packed._replace(scales=packed.scales.clamp(120, 124))
            want = floats.dequantize(packed, dtype)
        for rows in (1, 17, 40):
            x, bias = torch.randn(rows, packed.inputs).to(dtype), torch.randn(packed.outputs).to(dtype)
            for added in (None, bias):
                y = floats_triton.linear(x, packed, added)
                right = x.double() @ want.double().t() + (0 if added is None else added.double())
                bound = 1e-4 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(y.double(), right, atol=bound, rtol=bound)


if __name__ == "__main__":
    main()
