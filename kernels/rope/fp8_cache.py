"""Keys and values of a cache in 8 bits: e4m3 codes, and a scale for each head of each token, a power of two.

The scale is the smallest that leaves no code beyond e4m3's largest number. It is stored as its exponent, one byte
(E8M0 of the OCP's microscaling formats, v1.0). As it is a power of two, code times scale is a number of f16, bf16 and
f32 alike: kernels dequantise exactly, in whatever dtype they compute, and a power of two moves no rounding of e4m3's,
so that a finer scale would lose as much. Scales of a block stand head by head, [blocks, heads, 2, block_size]: of the
first part, keys, and of the second, values. Of latents (attention/mla.py), which are one head, the parts are the latent
and the rotated key behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0  # e4m3's largest number
# Exponents as bytes, so that f16 has code times scale: down to 2^-22, and up to 2^7, where codes end at 57344.
LOWEST, HIGHEST = 127 - 22, 127 + 7


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., dim] as codes [..., dim] e4m3 and exponents [...] uint8. Larger numbers than 57344, and NaNs, become
    e4m3's largest; the sign stays."""
    wide = x.float()
    # A mantissa of more than 448's, 1.75, takes one exponent more.
    exponents = ((wide.abs().amax(-1).view(torch.int32) + 0x1FFFFF) >> 23).sub_(8).clamp_(LOWEST, HIGHEST)
    y = (wide / scales_of(exponents)[..., None]).nan_to_num(E4M3_MAX).clamp_(-E4M3_MAX, E4M3_MAX)
    return y.to(E4M3), exponents.to(torch.uint8)


def dequantize(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """codes [..., dim] and exponents [...] as numbers."""
    return (codes.float() * scales_of(exponents)[..., None]).to(dtype)


def scales_of(exponents: Tensor) -> Tensor:
    """f32, from bytes."""
    return (exponents.to(torch.int32) << 23).view(torch.float32)


def store(x: Tensor, codes: Tensor, scales: Tensor, part: int, slots: Tensor) -> None:
    """x [T, heads, dim] goes to `slots` of codes [blocks, block_size, heads, dim], and its scales, as of this part."""
    y, exponents = quantize(x)
    codes.view(torch.uint8).view(-1, *codes.shape[2:]).index_copy_(0, slots, y.view(torch.uint8))
    size = scales.shape[3]
    scales[slots // size, :, part, slots % size] = exponents


def gather(codes: Tensor, scales: Tensor, part: int, slots: Tensor) -> Tensor:
    """The numbers in `slots` [n] of the codes: [n, heads, dim] f32."""
    rows = codes.view(torch.uint8).view(-1, *codes.shape[2:]).index_select(0, slots).view(E4M3)
    size = scales.shape[3]
    return dequantize(rows, scales[slots // size, :, part, slots % size], torch.float32)


def gather_latents(cache: Tensor, scales: Tensor, slots: Tensor, latent: int, dtype: torch.dtype) -> Tensor:
    """The numbers in `slots` [n] of a cache of latents [blocks, block_size, latent + rope]: [n, latent + rope]."""
    if cache.is_cuda:
        from . import fp8_triton

        return fp8_triton.gather_latents(cache, scales, slots, latent, dtype)
    return gather_latents_reference(cache, scales, slots, latent, dtype)


def gather_latents_reference(cache: Tensor, scales: Tensor, slots: Tensor, latent: int, dtype: torch.dtype) -> Tensor:
    parts = (gather(part[:, :, None], scales, i, slots)[:, 0] for i, part in enumerate(split_latents(cache, latent)))
    return torch.cat(tuple(parts), 1).to(dtype)


def store_latents(x: Tensor, cache: Tensor, scales: Tensor, latent: int, slots: Tensor) -> None:
    """x [T, latent + rope], normed and rotated, goes to `slots` of the cache."""
    for i, part in enumerate(split_latents(cache, latent)):
        store(x[:, None, :latent] if i == 0 else x[:, None, latent:], part[:, :, None], scales, i, slots)


def split_latents(cache: Tensor, latent: int) -> list[Tensor]:
    """Both parts, or the first one alone where the second has no elements."""
    return [part for part in (cache[..., :latent], cache[..., latent:]) if part.shape[-1]]
