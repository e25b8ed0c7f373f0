"""How ggml's blocks hold numbers of fewer than 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor


def f16(x: Tensor) -> Tensor:
    """Bytes [..., 2 n] as numbers [..., n]."""
    return x.contiguous().view(torch.float16)


def as_bytes(x: Tensor) -> Tensor:
    """f16 [..., n] → bytes [..., 2 n]."""
    return x.to(torch.float16).contiguous().view(torch.uint8)


def fields(x: Tensor, bits: int) -> Tensor:
    """uint8 [..., n] → uint8 [..., 8 / bits, n]: the lowest `bits` of all bytes, then the next."""
    return torch.stack([x >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -2)


def join(x: Tensor, bits: int) -> Tensor:
    """The reverse of `fields`."""
    made = torch.zeros_like(x[..., 0, :])
    for index, part in enumerate(x.unbind(-2)):
        made |= part << bits * index
    return made


def k_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 bytes of Q4_K and Q5_K [..., 12] → eight scales and eight minima of 6 bits, uint8 [..., 8]."""
    scales, minima, rest = x.split(4, -1)
    return (
        torch.cat((scales & 63, rest & 15 | scales >> 2 & 48), -1),
        torch.cat((minima & 63, rest >> 4 | minima >> 2 & 48), -1),
    )


def join_k_scales(scales: Tensor, minima: Tensor) -> Tensor:
    """The reverse of `k_scales`."""
    (s, s_end), (m, m_end) = scales.split(4, -1), minima.split(4, -1)
    return torch.cat((s | (s_end & 48) << 2, m | (m_end & 48) << 2, s_end & 15 | (m_end & 15) << 4), -1)


def joined(*parts: Tensor) -> Tensor:
    """Blocks [O, S, bytes] of their parts [O, S, ...], bytes and f16 numbers."""
    flat = (part.flatten(2) for part in parts)
    return torch.cat([as_bytes(one) if one.dtype == torch.float16 else one for one in flat], -1)
