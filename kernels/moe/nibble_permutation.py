"""Bytes repacked into another form in which the same nibbles lie in other places: one kernel for all such forms.

gpu_layout.py repacks experts for CPUs into experts for GPUs by some twenty operations of torch. Where that moves
nibbles alone, and flips some bits, trying it out finds from where each comes. What is found is compared with torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MAX_UNIT_BYTES = 1 << 15  # bytes of a unit: the numbers of its nibbles have 16 bits


class Permutation(NamedTuple):
    """How units of `size` bytes are repacked, each alone."""

    table: Tensor  # int32 [bytes made]: the numbers of the lower nibble, and of the upper one 16 bits higher
    flips: Tensor  # uint8 [bytes made]: bits that are flipped
    size: int


def find(make: Callable[[Tensor], Tensor], given: Tensor) -> Permutation | None:
    """make: of a tensor like `given`, uint8 [..., n, bytes], another one [..., m, bytes]. None where it does not move
    nibbles within units, of which there are as many as divide n and m."""
    flips = make(torch.zeros_like(given))
    if given.dtype != torch.uint8 or flips.dtype != torch.uint8 or not given.numel() or not flips.numel():
        return None
    units = math.prod(given.shape[:-2]) * math.gcd(given.shape[-2], flips.shape[-2])
    if given.numel() % units or flips.numel() % units or (size := given.numel() // units) > MAX_UNIT_BYTES:
        return None
    flips = flips.reshape(units, -1)[0]
    numbers = torch.arange(2 * size, dtype=torch.int32, device=given.device).view(size, 2)
    low, high = (torch.zeros(flips.shape, dtype=torch.int32, device=given.device) for _ in range(2))
    for bit in range((2 * size - 1).bit_length()):
        bit_planes = (numbers >> bit & 1) * 15
        one = (bit_planes[:, 0] | bit_planes[:, 1] << 4).to(torch.uint8).expand(units, size).reshape(given.shape)
        made = make(one).reshape(units, -1)[0] ^ flips
        low |= (made & 1).int() << bit
        high |= (made >> 4 & 1).int() << bit
    found = Permutation(low | high << 16, flips.contiguous(), size)
    some = torch.randint(0, 256, given.shape, dtype=torch.uint8, device=given.device)
    known = int(max(low.max(), high.max())) < 2 * size
    return found if known and torch.equal(permute_reference(found, some), make(some).flatten()) else None


def permute_reference(permutation: Permutation, given: Tensor) -> Tensor:
    """given: contiguous, whole units. All bytes made, [n]."""
    whole = given.reshape(-1, permutation.size)
    nibbles = torch.stack((whole & 15, whole >> 4), 2).flatten(1)
    low, high = permutation.table & 0xFFFF, permutation.table >> 16 & 0xFFFF
    return (nibbles[:, low.long()] | nibbles[:, high.long()] << 4).bitwise_xor(permutation.flips).flatten()


def permute(permutation: Permutation, given: Tensor, out: Tensor, parts: Tensor | None = None) -> None:
    """Fill `out` with what is made of `given`; both contiguous, uint8, and on the device of `permutation`. parts
    int32 [1], on GPUs: how many of given [n, ...] are repacked, where not all are."""
    if given.is_cuda:
        from . import nibble_permutation_triton

        nibble_permutation_triton.permute(permutation, given, out, parts)
    else:
        out.view(-1).copy_(permute_reference(permutation, given))
