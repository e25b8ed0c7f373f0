"""RMS norms in e4m3, for the linears of e4m3_wgmma.py: the norm in 16 bits is neither written nor read."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import jit
from ..norm import norm
from .e4m3_rows import E4m3Rows

VECTOR = 8  # elements


def sum_add_rms_norm(
    terms: Tensor, residual: Tensor, weight: Tensor, eps: float, other: Tensor | None = None
) -> tuple[E4m3Rows, Tensor]:
    """What `e4m3_rows.encode` makes of norm.sum_add_rms_norm, bit for bit, and the residual [T, H].

    All are of 16 bits and begin at multiples of 16 bytes; H is a multiple of 16. For sm_90 and later.
    """
    (rows, size), added = residual.shape, [residual] if other is None else [residual, other]
    *_, last = added
    assert jit.plain(terms, weight, *added) and size % (2 * VECTOR) == 0
    codes = torch.empty(rows, size, dtype=torch.uint8, device=residual.device)
    scales = torch.empty(rows, device=residual.device)
    sizes = norm.sizes(size, VECTOR, len(added), terms.shape[1])
    kernel = jit.kernel("e4m3_norm", "sum_add_rms_norm_e4m3", residual.dtype, **sizes)
    kernel((rows, 1, 1), sizes["THREADS"], terms, last, norm.pitch(last), residual, weight, codes, scales, eps)
    return E4m3Rows(codes, scales, residual.dtype), residual
