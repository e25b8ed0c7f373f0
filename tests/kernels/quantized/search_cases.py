"""Groups whose scales are searched, and what is asked of those found; run as a program, Triton's in its interpreter.

Without a GPU: TRITON_INTERPRET=1 python -m phalanx.tests.kernels.quantized.search_cases
"""

from __future__ import annotations

from typing import Any

import torch
from phalanx.kernels.quantized import scale_search
from phalanx.kernels.quantized.linear import dequantize
from phalanx.kernels.quantized.stack import stack
from torch import Tensor

from ..attention.decoding import mend_interpreter


def make(size: int) -> Tensor:
    """Normal ones of many magnitudes; zeros, one value everywhere or alone, and none below 0."""
    draw = torch.Generator().manual_seed(1)
    groups = torch.randn(200, size, generator=draw) * torch.logspace(-6, 3, 200)[:, None]
    groups[3], groups[4], groups[5, 1:] = 0, -2, 0
    groups[6] = groups[6].abs()
    return groups


def check(groups: Tensor) -> None:
    """Either of two equally good scales may be found: the errors are alike."""
    plain = groups.cpu()

    def error(most: int, scales: Tensor, minima: Tensor | float = 0.0) -> Tensor:
        scales, minima = scales.cpu().unsqueeze(1), torch.as_tensor(minima).cpu().unsqueeze(-1)
        low = -most if not minima.any() else 0
        codes = scale_search.codes_of(plain + minima, scales.squeeze(1), low, most - 1 if low else most)
        return (codes * scales - minima - plain).square().sum(1)

    def alike(got: Tensor, want: Tensor) -> None:
        ratio = (got + 1e-20) / (want + 1e-20)
        assert ratio.min() > 0.5 and ratio.max() < 2 and abs(ratio.mean() - 1) < 0.01

    for most in (4, 32):
        scales, want = scale_search.signed(groups, most), scale_search.signed_reference(plain, most)
        assert scales.isfinite().all()
        alike(error(most, scales), error(most, want))
    for most in (3, 15, 31):
        got, wanted = scale_search.with_minima(groups, most), scale_search.with_minima_reference(plain, most)
        assert (torch.stack(got) >= 0).all() and torch.stack(got).isfinite().all()
        alike(error(most, *got), error(most, *wanted))


def check_stack(codec: Any, outputs: int, device: str) -> None:
    """Experts packed two at once are what each is alone, whether its outputs fill blocks or not."""
    weights = torch.randn(5, outputs, 512, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    made = [
        stack(codec, lambda i, n=n: codec.encode(weights[i * n : i * n + n].flatten(0, 1)), weights.shape, n)
        for n in (1, 2)
    ]
    alone, two = made
    assert all(map(torch.equal, alone.tensors, two.tensors)) and alone.tensors
    for index, weight in enumerate(weights):
        want = dequantize(codec.pack(*codec.encode(weight)), torch.bfloat16)
        assert torch.equal(two.expert(index, torch.bfloat16), want)


if __name__ == "__main__":
    from phalanx.kernels.quantized import scale_search_triton

    mend_interpreter()
    torch.use_deterministic_algorithms(True)  # which fills fresh memory with NaN

    def by_triton(groups: Tensor, scales: Tensor, minima: Tensor | None, most: int) -> bool:
        scale_search_triton.search(groups, scales, minima, most, scale_search.STEPS)
        return True

    scale_search._search = by_triton
    for size in (16, 32):
        check(make(size))
