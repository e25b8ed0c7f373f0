"""e4m3 on CPUs: e4m3_cpu.cpp. Few rows are multiplied with the codes as they lie; the weight is never in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..activation.activation import gated_activation
from ..candidate import Candidate
from ..cpp import ops
from ..cpp.scratch import Scratch
from . import packing_cpu, target
from .packed_layouts import N_TILE

SOURCE = "e4m3_cpu"
MAX_ROWS = 64
STEP = 4  # inputs that are converted together
NAN = 127  # the code, without its sign


class Packed(NamedTuple):
    """A weight [O, I] in blocks of 16 outputs, the last one filled up with zeros."""

    codes: Tensor  # uint8 [ceil(O / 16), I, 16]
    scales: Tensor  # f32 [ceil(O / 16), I / unit, 16]
    outputs: int

    @property
    def inputs(self) -> int:
        return self.codes.shape[1]

    @property
    def unit(self) -> int:
        """Inputs of a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantize(self, dtype: torch.dtype, first: int, last: int) -> Tensor:
        """Outputs first to last of the weight, [last - first, I]; first is a block's."""
        made = dtype if dtype in ops.SUFFIXES else torch.float32
        y = self.codes.new_empty(last - first, self.inputs, dtype=made)
        codes, scales = (one[first // N_TILE :] for one in (self.codes, self.scales))
        ops.typed(SOURCE, "e4m3_dequantize", made)(codes, scales, y, self.inputs, last - first, self.unit)
        return y.to(dtype)


def takes(codes: Tensor, unit: int) -> bool:
    """Whether operations read codes [O, I], of which `unit` inputs share a scale."""
    return target.of(codes) == "cpu" and codes.numel() > 0 and unit % STEP == 0 and ops.available()


def encode(weight: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [O, I] and scales f32 [O, I / unit] of a contiguous weight in f32, bf16 or f16.

    unit: a multiple of 16.
    """
    codes = weight.new_empty(weight.shape, dtype=torch.uint8)
    scales = weight.new_empty(len(weight), weight.shape[1] // unit, dtype=torch.float32)
    ops.typed(SOURCE, "e4m3_encode", weight.dtype)(weight, codes, scales, scales.numel(), unit)
    return codes, scales


def pack(codes: Tensor, scales: Tensor) -> Packed | None:
    """codes uint8 [O, I], scales f32 [O, G]. None where a code is no number: read as f16, it would be one."""
    if packing_cpu.readable(codes):
        outputs, inputs = codes.shape
        blocks, nans = codes.new_empty(-(-outputs // N_TILE), inputs, N_TILE), torch.zeros(1, dtype=torch.int64)
        ops.op(packing_cpu.SOURCE, "pack_e4m3")(codes, blocks, nans, outputs, inputs)
        numbers = not nans.item()
    else:
        blocks, numbers = _blocked(codes), not bool(((codes & NAN) == NAN).any())
    return Packed(blocks, _blocked(scales), len(codes)) if numbers else None


def _blocked(x: Tensor) -> Tensor:
    """[O, n] → [ceil(O / 16), n, 16], zeros behind the last output."""
    whole = pad(x, (0, 0, 0, -len(x) % N_TILE))
    return whole.view(-1, N_TILE, x.shape[1]).transpose(1, 2).contiguous()


def supports(x: Tensor, packed: object, gate: str = "", bias: Tensor | None = None) -> bool:
    """x [T, I]."""
    rows = 0 < len(x) <= MAX_ROWS and x.stride(1) == 1
    return isinstance(packed, Packed) and rows and x.dtype in ops.SUFFIXES


def linear(x: Tensor, packed: Packed, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """[T, O], or gated [T, O / 2], where it supports; sums are f32."""
    rows, (inputs, outputs) = len(x), (packed.inputs, packed.outputs)
    y = x.new_empty(rows, outputs)
    wide, calls = _widened(x, Scratch(rows))
    of_weight = (packed.codes, packed.scales, bias, y, rows, inputs, outputs, wide.stride(0), packed.unit)
    ops.run(*calls, (ops.typed(SOURCE, "e4m3_linear", x.dtype), (wide, *of_weight)))
    return gated_activation(y, gate) if gate else y


CANDIDATE = Candidate("e4m3_cpu.cpp", "CPUs", f"up to {MAX_ROWS} rows of f32 or bf16, FP8", supports, linear)


def _widened(x: Tensor, scratch: Scratch, offsets: Tensor | None = None, experts: int = 0) -> tuple[Tensor, ops.Calls]:
    """x in f32, and the operations that make it. offsets: of experts, which show what rows there are."""
    if x.dtype == torch.float32:
        return x, ()
    wide = scratch.empty(x, tuple(x.shape), torch.float32)
    return wide, ((ops.op(SOURCE, "e4m3_widen"), (x, offsets, wide, len(x), x.shape[1], x.stride(0), experts)),)


def experts(
    x: Tensor, stack: Packed, sizes: tuple[int, int], offsets: Tensor, bias: Tensor | None, y: Tensor,
    scratch: Scratch, at: Tensor | None = None,
) -> ops.Calls:  # fmt: skip
    """Operations that make y [P, O] of x [P, I], whose rows are sorted by expert, as `blocks_cpu.experts` does."""
    count, outputs = sizes
    wide, calls = _widened(x, scratch, offsets, count)
    dims = count, stack.inputs, outputs, wide.stride(0), stack.unit
    of = wide, stack.codes, stack.scales, bias, offsets, at, scratch.taken, y, *dims
    return (*calls, (ops.typed(SOURCE, "e4m3_experts", x.dtype), of))
