"""int4 on GPUs: pieces of 16 outputs by 64 inputs (int4.cuh), codes of 4 bits with a scale and a zero point a group."""

from __future__ import annotations

import torch
from torch import Tensor

from .pieces_cuda import STRIP, Layout, Packed

INPUTS = 64  # of a piece
ZERO = 8  # where none is stored
MOST_ZERO = 127  # that a bf16 holds above 128
HEADER = "int4"


def layout(scaled: int, zeros: bool) -> Layout:
    """scaled: inputs with one scale, 32 or 64. zeros: whether zero points are stored."""
    size = 512 + INPUTS // scaled * (32 + 16 * zeros)
    # Its widening was fitted as 0.43 beside q8_0's 0.56, and is scaled as that became 0.62; not timed again.
    return Layout(HEADER, INPUTS, size, widening=0.48, sizes=(("SCALED", scaled), ("ZEROS", int(zeros))))


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, stored_zeros: bool = False) -> Packed:
    """codes [O, I] uint8 below 16, scales [O, G] f16 and zeros [O, G] up to MOST_ZERO, on any device.

    Groups have a multiple of 32 inputs, pieces 64. Weights are (code - zero) * scale. stored_zeros: also where all are
    ZERO.
    """
    (outputs, inputs), group = codes.shape, codes.shape[1] // scales.shape[1]
    if inputs % INPUTS or group % 32 or scales.shape != zeros.shape or scales.shape != (outputs, inputs // group):
        raise ValueError(f"int4 takes groups of 32, 64 or more inputs: codes {codes.shape}, scales {scales.shape}")
    scaled = INPUTS if group % INPUTS == 0 else 32
    form = layout(scaled, stored_zeros or bool((zeros != ZERO).any()))
    strips, pieces = -(-outputs // STRIP), inputs // INPUTS
    whole = codes.new_zeros(strips * STRIP, inputs)
    whole[:outputs] = codes
    words = words_of(whole)
    tables = [scales.to(torch.float16)] + ([zeros.to(torch.uint8)] if dict(form.sizes)["ZEROS"] else [])
    return Packed(
        torch.cat([words, *(_pairs(table, strips, group // scaled, pieces) for table in tables)], 2), outputs, form
    )


def words_of(codes: Tensor) -> Tensor:
    """Codes uint8 [O, I] of 4 bits, of whole pieces of 16 x 64 → a piece's bytes [O / 16, I / 64, 512]."""
    strips, pieces = codes.shape[0] // STRIP, codes.shape[1] // INPUTS
    # Of an output: half h, lane's g. Of an input: step s, eight e, lane's t, byte's second bit b.
    parts = codes.view(strips, 2, 8, pieces, 4, 2, 4, 2)
    both = parts[:, 0] | parts[:, 1] << 4  # strip g piece s e t b   ->   strip piece g t s b e
    return both.permute(0, 2, 1, 5, 3, 6, 4).reshape(strips, pieces, 512)


def codes_of(words: Tensor) -> Tensor:
    """The reverse."""
    strips, pieces, _ = words.shape
    both = words.reshape(strips, pieces, 8, 4, 4, 2, 2).permute(0, 2, 1, 4, 6, 3, 5)
    return torch.stack((both & 15, both >> 4), 1).reshape(strips * STRIP, pieces * INPUTS)


def _pairs(table: Tensor, strips: int, repeats: int, pieces: int) -> Tensor:
    """[O, G] → bytes [strips, pieces, …]: of each group in a piece those of outputs g and g + 8 side by side."""
    table = table.repeat_interleave(repeats, 1)
    whole = table.new_zeros(strips * STRIP, table.shape[1])
    whole[: len(table)] = table
    pairs = whole.view(strips, 2, 8, pieces, -1).permute(0, 3, 4, 2, 1).reshape(strips, pieces, -1)
    return pairs.view(torch.uint8)


def unpack(packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """codes [O, I] uint8, scales f16 and zeros uint8 [O, I / 32 or 64]."""
    strips, pieces, _ = packed.pieces.shape
    sizes = dict(packed.layout.sizes)

    def table(start: int, width: int, dtype: torch.dtype) -> Tensor:
        part = packed.pieces[..., start : start + width].contiguous().view(dtype)
        pairs = part.view(strips, pieces, -1, 8, 2).permute(0, 4, 3, 1, 2)
        return pairs.reshape(strips * STRIP, -1)[: packed.outputs]

    each = INPUTS // sizes["SCALED"]
    scales = table(512, 32 * each, torch.float16)
    zeros = table(512 + 32 * each, 16 * each, torch.uint8) if sizes["ZEROS"] else torch.full_like(scales, ZERO).byte()
    return codes_of(packed.pieces[..., :512])[: packed.outputs], scales, zeros
