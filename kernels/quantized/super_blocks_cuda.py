"""Super-blocks on GPUs: pieces of 16 outputs by 64 inputs (super_blocks.cuh), each with its factors, scales, minima."""

from __future__ import annotations

import torch
from torch import Tensor

from . import int4_cuda
from .int4_cuda import INPUTS
from .pieces_cuda import GEMV_ROWS, STRIP, Layout, Packed
from .quantized_gemm import takes_turns
from .super_blocks_form import Form

HEADER = "super_blocks"
# As Layout has it, by the number of instructions, of codes of so many bits.
WIDENING = {4: 0.66, 6: 0.75, 8: 0.66}


def takes(inputs: int, form: Form) -> bool:
    return inputs > 0 and inputs % INPUTS == inputs % form.super == 0


def layout(form: Form) -> Layout:
    each, groups, kinds = INPUTS // min(form.super, INPUTS), INPUTS // form.group, 1 + form.minima
    size = 128 * form.bits + (32 * each + 16 * groups) * kinds
    of_scales = ("SUPER", INPUTS // each), ("FACTORED", form.super), ("GROUP", form.group), ("MINIMA", int(form.minima))
    sizes = ("BITS", form.bits), ("ZERO", form.zero), *of_scales
    # Where warps of quantized_gemm.cu take turns, it is faster than a GEMV of several rows.
    return Layout(HEADER, INPUTS, size, WIDENING[form.bits], sizes, 1 if takes_turns(sizes) else GEMV_ROWS)


def pack(codes: Tensor, factors: Tensor, scales: Tensor, minima: Tensor, form: Form) -> Tensor:
    """Pieces uint8 [ceil(O / 16), I / 64, bytes] of what a `Decoded` has, on any device."""
    outputs, inputs = codes.shape
    strips, pieces = -(-outputs // STRIP), inputs // INPUTS
    each, groups = INPUTS // min(form.super, INPUTS), INPUTS // form.group

    def whole(x: Tensor) -> Tensor:
        y = x.new_zeros(strips * STRIP, *x.shape[1:])
        y[:outputs] = x
        return y

    if form.bits == 8:
        # Of an output: half h, lane's g. Of an input: step's two bits s, eight e, lane's t, pair's second b.
        # strip h g piece s e t b   ->   strip piece, first bit of s, g t, second of s, h b e
        halves = whole(codes).view(strips, 2, 8, pieces, 2, 2, 2, 4, 2)
        words = halves.permute(0, 3, 4, 2, 7, 5, 1, 8, 6).reshape(strips, pieces, 1024)
    else:
        words = int4_cuda.words_of(whole(codes & 15))
    if form.bits == 6:
        words = torch.cat((words, _upper_of(whole(codes >> 4))), 2)
    kinds = 1 + form.minima
    wide = factors.repeat_interleave(max(1, form.super // INPUTS), 1)[..., :kinds]
    # output, super-block of a piece, kind   ->   strip piece, kind, super-block, g, half
    halves = whole(wide).view(strips, 2, 8, pieces, each, kinds).permute(0, 3, 5, 4, 2, 1)
    # output, pair of groups and kinds, first or second of it   ->   strip piece, pair, g, first or second, half
    numbers = torch.stack((scales, minima)[:kinds], 2).view(torch.uint8) ^ 128
    pairs = whole(numbers.flatten(1)).view(strips, 2, 8, pieces, groups * kinds // 2, 2).permute(0, 3, 4, 2, 5, 1)
    tables = (x.reshape(strips, pieces, -1).view(torch.uint8) for x in (halves, pairs))
    return torch.cat((words, *tables), 2)


def _upper_of(codes: Tensor) -> Tensor:
    """Codes' upper 2 bits uint8 [O, I], of whole pieces of 16 x 64 → a piece's bytes [O / 16, I / 64, 256]."""
    parts = codes.view(codes.shape[0] // STRIP, 2, 8, codes.shape[1] // INPUTS, 2, 2, 2, 4, 2)  # as in `pack`
    pairs = parts[:, :, :, :, :, 0] | parts[:, :, :, :, :, 1] << 2
    both = pairs[:, 0] | pairs[:, 1] << 4
    # strip g piece, first bit of s, e t b   ->   strip piece g t, first bit of s, b e
    return both.permute(0, 2, 1, 5, 3, 6, 4).reshape(len(both), -1, 256)


def _upper_codes(words: Tensor) -> Tensor:
    """The reverse."""
    both = words.reshape(*words.shape[:2], 8, 4, 2, 2, 2).permute(0, 2, 1, 4, 6, 3, 5)
    pairs = torch.stack((both & 15, both >> 4), 1)
    parts = torch.stack((pairs & 3, pairs >> 2), 5)
    return parts.reshape(len(words) * STRIP, -1)


def unpack(packed: Packed) -> tuple[Form, Tensor, Tensor, Tensor, Tensor]:
    """The form, whose super-blocks have at most 64 inputs and no bytes, and codes, factors, scales and minima."""
    strips, pieces, _ = packed.pieces.shape
    sizes = dict(packed.layout.sizes)
    form = Form(sizes["SUPER"], sizes["GROUP"], sizes["BITS"], sizes["ZERO"], 0, bool(sizes["MINIMA"]))
    each, groups, kinds, outputs = INPUTS // form.super, INPUTS // form.group, 1 + form.minima, packed.outputs
    words, of_factors, of_numbers = packed.pieces.split((128 * form.bits, 32 * each * kinds, 16 * groups * kinds), 2)
    if form.bits < 8:
        codes = int4_cuda.codes_of(words[..., :512])
        if form.bits == 6:
            codes |= _upper_codes(words[..., 512:]) << 4
    else:
        codes = words.reshape(strips, pieces, 2, 8, 4, 2, 2, 2, 2).permute(0, 6, 3, 1, 2, 5, 8, 4, 7)
    halves = of_factors.contiguous().view(torch.float16).view(strips, pieces, kinds, each, 8, 2)
    factors = halves.permute(0, 5, 4, 1, 3, 2).reshape(strips * STRIP, -1, kinds)[:outputs]
    pairs = (of_numbers ^ 128).view(torch.int8).view(strips, pieces, groups * kinds // 2, 8, 2, 2)
    numbers = pairs.permute(0, 5, 3, 1, 2, 4).reshape(strips * STRIP, -1, kinds)[:outputs]
    scales, minima = numbers[..., 0], numbers[..., -1] if form.minima else torch.zeros_like(numbers[..., 0])
    if not form.minima:
        factors = torch.cat((factors, torch.zeros_like(factors)), 2)
    return form, codes.reshape(strips * STRIP, pieces * INPUTS)[:outputs], factors, scales, minima
