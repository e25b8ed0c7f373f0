"""The one place where activations meet a weight matrix in full precision.

On CPUs, f32 matrices are kept in oneDNN's blocked layout in place of the plain one. Measured with one thread of a CPU
with AVX-512, weights of 4096 x 768 from memory: 4, 16 and 64 rows take 0.58, 1.1 and 3.8 ms, plain ones 1.5, 2.3 and
5.3. One to three rows are computed as four, at which the blocked kernel is faster: 1152 x 384 takes 118, 115 and 116 us
so, 140, 154 and 129 as they are, 272, 330 and 463 plain. All on a machine with other work; compare, don't quote.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from . import skinny

PACK_FROM = 1 << 16  # elements; a packed product costs 10 us more to start, which smaller matrices do not win back
ROWS_HINT = 16  # rows that the layout is chosen for; this one is the fastest, or nearly, from 1 to 256


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of weight [O, I], plus bias [O]: [T, O], contiguous. `weight` may be packed."""
    if weight.is_mkldnn:
        return _packed_linear(x, weight, bias)
    if bias is None and skinny.suits(x, weight):
        return skinny.skinny_linear(x, weight)
    return torch_linear(x, weight, bias)


def pack(weight: Tensor) -> Tensor:
    """The weight as `linear` likes it best on its device: a tensor for `linear` alone, or `weight` itself."""
    cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if not cpu or weight.dtype != torch.float32 or weight.numel() < PACK_FROM:
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = len(x)
    if not rows:
        return x.new_empty(0, weight.shape[0])
    if rows < 4:
        x = x.expand(4, -1) if rows == 1 else torch.cat((x, x))[:4]
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")[:rows]
