"""Weights as files hold them, laid out as kernels for CPUs read them: packing_cpu.cpp.

It reads more than 1 GB of a file a second on a core (MXFP4: 0.9), and needs no memory but that of what it makes. Where
tensors lie on a GPU, torch makes the same bytes (blocks_cpu.py and its callers).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpp import ops
from . import target

SOURCE = "packing_cpu"
BLOCK = 16  # outputs that lie together


def takes(x: Tensor) -> bool:
    """Whether operations read x, bytes or words, and CPUs will read what is packed of it."""
    return target.of(x) == "cpu" and readable(x) and ops.available()


def readable(x: Tensor) -> bool:
    """Whether all of x is contiguous in memory."""
    return x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0


def pack(type: str, blocks: Tensor, supers: int, bytes: int) -> Tensor:
    """ggml's blocks uint8 [O, supers * …] of a type → uint8 [ceil(O / 16), supers, bytes]."""
    made = blocks.new_empty(-(-len(blocks) // BLOCK), supers, bytes)
    ops.op(SOURCE, f"pack_{type}")(blocks, made, len(blocks), supers)
    return made


def dequantizes(type: str, blocks: Tensor) -> bool:
    """Whether there is an operation for blocks uint8 [O, bytes] of a type, as they lie."""
    return readable(blocks) and ops.available() and ops.has(SOURCE, f"dequantize_{type}")


def dequantize(type: str, blocks: Tensor, supers: int, elements: int) -> Tensor:
    """ggml's blocks uint8 [O, bytes], of so many super-blocks and elements a row → f32 [O, elements], as gguf-py
    computes them."""
    made = torch.empty(len(blocks), elements)
    ops.op(SOURCE, f"dequantize_{type}")(blocks, made, len(blocks) * supers)
    return made


def put_codes(codes: Tensor, blocks: Tensor, first: int, run: int, bits: int, flip: int = 0) -> None:
    """Write codes uint8 [O, I] of `bits` into blocks uint8 [ceil(O / 16), groups, bytes]: those of a group's first 32
    inputs from byte `first` on, of the next ones `run` bytes behind. flip: bits that are changed, of what fills up the
    last block too."""
    (outputs, inputs), (_, groups, group) = codes.shape, blocks.shape
    sizes = inputs // 32 // groups, run, group, groups * group
    ops.op(SOURCE, "put_codes")(codes, blocks.view(-1)[first:], outputs, inputs, bits, *sizes, flip)


def unpack_along_inputs(words: Tensor, bits: int) -> Tensor:
    """int32 [I * bits / 32, O], codes along the inputs → uint8 [O, I]."""
    outputs, inputs = words.shape[1], len(words) * 32 // bits
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    ops.op(SOURCE, "unpack_along_inputs")(words, codes, outputs, inputs, bits)
    return codes


def unpack_along_outputs(words: Tensor) -> Tensor:
    """int32 [I, O / 8], eight codes in AWQ's order → uint8 [O, I]."""
    outputs, inputs = words.shape[1] * 8, len(words)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    ops.op(SOURCE, "unpack_along_outputs")(words, codes, outputs, inputs, 4)
    return codes


def pack_e4m3(codes: Tensor) -> tuple[Tensor, bool]:
    """codes uint8 [O, I] → [ceil(O / 16), I, 16], and whether all are numbers."""
    outputs, inputs = codes.shape
    made, nans = codes.new_empty(-(-outputs // BLOCK), inputs, BLOCK), torch.zeros(1, dtype=torch.int64)
    ops.op(SOURCE, "pack_e4m3")(codes, made, nans, outputs, inputs)
    return made, not nans.item()
