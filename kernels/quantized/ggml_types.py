"""ggml's types of quantised weights: how their blocks hold numbers, each described once, and what the numbers mean.

A weight is (code - zero) * scale - minimum. Groups of 16 or 32 inputs have a scale and perhaps a minimum: f16 factors
of their block, times whole numbers where blocks are super-blocks of 256 inputs (gguf-py's quants.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .codec import SuperBlock

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # what codes of IQ4_NL stand for


@dataclass(frozen=True)
class Bits:
    """Bytes of a block that hold `bits` of numbers each: of each `span` bytes the lowest bits of all, then the next."""

    of: str  # codes, or numbers: the scales of all groups, then their minima
    bytes: int
    bits: int
    span: int
    shift: int = 0  # where these bits are in a number

    def read(self, x: Tensor) -> Tensor:
        """uint8 [..., bytes] → these bits of the numbers, uint8 [..., bytes * 8 / bits]."""
        spans = x.unflatten(-1, (-1, self.span))
        mask = (1 << self.bits) - 1
        some = torch.stack([spans >> at & mask for at in range(0, 8, self.bits)], -2)
        return some.flatten(-3) << self.shift

    def write(self, numbers: Tensor) -> Tensor:
        """The reverse."""
        some = (numbers >> self.shift & (1 << self.bits) - 1).unflatten(-1, (-1, 8 // self.bits, self.span))
        made = torch.zeros_like(some[..., 0, :])
        for index, one in enumerate(some.unbind(-2)):
            made |= one << self.bits * index
        return made.flatten(-2)


@dataclass(frozen=True)
class Factors:
    """f16 numbers: of scales, and of minima where there are two."""

    count: int

    of: ClassVar[str] = "factors"

    @property
    def bytes(self) -> int:
        return 2 * self.count

    def read(self, x: Tensor) -> Tensor:
        return x.contiguous().view(torch.float16)

    def write(self, factors: Tensor) -> Tensor:
        return factors.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class KScales:
    """Eight scales and eight minima of 6 bits in 12 bytes: their lower bits and, above those of the first four, the
    upper bits of the last four, whose lower bits stand in pairs in the last bytes."""

    of: ClassVar[str] = "numbers"
    bytes: ClassVar[int] = 12

    def read(self, x: Tensor) -> Tensor:
        scales, minima, rest = x.split(4, -1)
        last = rest & 15 | scales >> 2 & 48, rest >> 4 | minima >> 2 & 48
        return torch.cat((scales & 63, last[0], minima & 63, last[1]), -1)

    def write(self, numbers: Tensor) -> Tensor:
        s, s_end, m, m_end = numbers.split(4, -1)
        return torch.cat((s | (s_end & 48) << 2, m | (m_end & 48) << 2, s_end & 15 | (m_end & 15) << 4), -1)


class Numbers(NamedTuple):
    """The contents of blocks [O, S] of a type."""

    factors: Tensor  # f16 [O, S, 1 or 2]
    numbers: Tensor | None  # uint8 [O, S, groups, or twice as many]; None: the type has none
    codes: Tensor  # uint8 [O, S, super]


class Decoded(NamedTuple):
    """A weight [O, I], or some outputs of one. Of S super-blocks and G groups."""

    codes: Tensor  # uint8 [O, I]
    factors: Tensor  # f16 [O, S, 2], of scales and of minima
    scales: Tensor  # int8 [O, G]
    minima: Tensor  # int8 [O, G]


class Type(NamedTuple):
    """One of ggml's types."""

    name: str  # as C++ has it, which knows its blocks as well (ggml_types.h)
    code_bits: int  # of a code in files
    form: SuperBlock  # of a code as it is kept in super-blocks
    parts: tuple[Bits | Factors | KScales, ...]  # of a block, one behind the other
    scale_bits: int = 0  # of the scales of a super-block's groups; 0: its factors are the scales
    above: int = 0  # by which scales are stored larger than they are
    looked_up: bool = False  # whether codes are places in TABLE

    @property
    def bytes(self) -> int:
        """Bytes of a block."""
        return sum(part.bytes for part in self.parts)

    @property
    def factors_at(self) -> range:
        """The bytes of a block where its f16 factors begin."""
        factors = next(part for part in self.parts if isinstance(part, Factors))
        first = sum(part.bytes for part in self.parts[: self.parts.index(factors)])
        return range(first, first + factors.bytes, 2)

    @property
    def kept_as_q8_0(self) -> bool:
        """Whether codes are kept in 8 bits, with one scale for each 32 inputs (int8_codes.py)."""
        return self.form[:3] == (32, 32, 8)

    def split(self, blocks: Tensor) -> Numbers:
        """blocks uint8 [O, S, bytes]."""
        found: dict[str, Tensor] = {}
        packed_tiles = blocks.split([part.bytes for part in self.parts], -1)
        for part, packed_tile in zip(self.parts, packed_tiles, strict=True):
            numbers = part.read(packed_tile)
            found[part.of] = found[part.of] | numbers if part.of in found else numbers
        return Numbers(found["factors"], found.get("numbers"), found["codes"])

    def join(self, numbers: Numbers) -> Tensor:
        """The reverse."""
        held = numbers._asdict()
        return torch.cat([part.write(held[part.of]) for part in self.parts], -1)

    def decode(self, blocks: Tensor) -> Decoded:
        """blocks uint8 [O, S, bytes]."""
        factors, numbers, codes = self.split(blocks)
        if self.looked_up:
            codes = (torch.tensor(TABLE, device=blocks.device) + self.form.zero).to(torch.uint8)[codes.int()]
        if numbers is None:
            groups = len(blocks), blocks.shape[1] * self.form.super // self.form.group
            scales = torch.ones(groups, dtype=torch.int8, device=blocks.device)
            minima = -scales if self.form.minima else torch.zeros_like(scales)
        else:
            whole = numbers.view(torch.int8) - self.above
            scales, minima = whole.chunk(2, -1) if self.form.minima else (whole, torch.zeros_like(whole))
            scales, minima = scales.flatten(1), minima.flatten(1)
        return Decoded(codes.flatten(1), factors.expand(*factors.shape[:2], 2), scales, minima)


def weights(decoded: Decoded, form: SuperBlock) -> Tensor:
    """f32 [O, I], as gguf-py computes them."""
    codes, factors, scales, minima = decoded
    each = form.super // form.group
    of_scales, of_minima = (factors[..., i].float().repeat_interleave(each, 1) for i in (0, 1))
    groups = codes.view(*scales.shape, form.group).float() - form.zero
    groups *= (of_scales * scales).unsqueeze(2)
    groups -= (of_minima * minima).unsqueeze(2)
    return groups.view(codes.shape)


_FIFTHS = Bits("codes", 4, 1, 1, shift=4)  # the fifth bits of 32 codes
_FOURS = Bits("codes", 16, 4, 16)  # the lower bits of 32 codes
TYPES = {
    one.name: one
    for one in (
        Type("q4_0", 4, SuperBlock(32, 32, 4, 8, minima=False), (Factors(1), _FOURS)),
        Type("q4_1", 4, SuperBlock(32, 32, 4, 0), (Factors(2), _FOURS)),
        Type("q5_0", 5, SuperBlock(32, 32, 8, 16, minima=False), (Factors(1), _FIFTHS, _FOURS)),
        Type("q5_1", 5, SuperBlock(32, 32, 6, 0), (Factors(2), _FIFTHS, _FOURS)),
        Type("q8_0", 8, SuperBlock(32, 32, 8, 0, minima=False), (Factors(1), Bits("codes", 32, 8, 32))),
        Type("iq4_nl", 4, SuperBlock(32, 32, 8, 128, minima=False), (Factors(1), _FOURS), looked_up=True),
        Type(
            "q2_k", 2, SuperBlock(256, 16, 4, 0), scale_bits=4,
            parts=(Bits("numbers", 16, 4, 16), Bits("codes", 64, 2, 32), Factors(2)),
        ),
        Type(
            "q3_k", 3, SuperBlock(256, 16, 4, 4, minima=False), scale_bits=6, above=32,
            parts=(
                Bits("codes", 32, 1, 32, shift=2), Bits("codes", 64, 2, 32),
                Bits("numbers", 8, 4, 8), Bits("numbers", 4, 2, 4, shift=4), Factors(1),
            ),
        ),
        Type("q4_k", 4, SuperBlock(256, 32, 4, 0), (Factors(2), KScales(), Bits("codes", 128, 4, 32)), scale_bits=6),
        Type(
            "q5_k", 5, SuperBlock(256, 32, 6, 0), scale_bits=6,
            parts=(Factors(2), KScales(), Bits("codes", 32, 1, 32, shift=4), Bits("codes", 128, 4, 32)),
        ),
        Type(
            "q6_k", 6, SuperBlock(256, 16, 6, 32, minima=False), scale_bits=8,
            parts=(
                Bits("codes", 128, 4, 64), Bits("codes", 64, 2, 32, shift=4), Bits("numbers", 16, 8, 16), Factors(1),
            ),
        ),
        Type(
            "iq4_xs", 4, SuperBlock(256, 32, 8, 128, minima=False), scale_bits=6, above=32, looked_up=True,
            parts=(Factors(1), Bits("numbers", 2, 2, 1, shift=4), Bits("numbers", 4, 4, 1), Bits("codes", 128, 4, 16)),
        ),
        Type("tq2_0", 2, SuperBlock(256, 32, 4, 1, minima=False), (Bits("codes", 64, 2, 32), Factors(1))),
    )
}  # fmt: skip
