"""Weights as files hold them, laid out as kernels for CPUs read them: packing_cpu.cpp.

It reads more than 1 GB of a file a second on a core (MXFP4: 0.9), and needs no memory but that of what it makes. Where
tensors lie on a GPU, torch makes the same bytes (blocks_cpu.py and its callers).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpp import ops
from . import target
from .packed_layouts import N_TILE

SOURCE = "packing_cpu"


def takes(x: Tensor) -> bool:
    """Whether operations read x, bytes or words, and CPUs will read what is packed of it."""
    return target.of(x) == "cpu" and readable(x) and ops.available()


def readable(x: Tensor) -> bool:
    """Whether all of x is contiguous in memory."""
    return x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0


def pack(type: str, blocks: Tensor, supers: int, bytes: int) -> Tensor:
    """ggml's blocks uint8 [O, supers * …] of a type → uint8 [ceil(O / 16), supers, bytes]."""
    made = blocks.new_empty(-(-len(blocks) // N_TILE), supers, bytes)
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


def unpack_words(words: Tensor, along: str) -> Tensor:
    """Codes of 4 bits in int32 words → uint8 [O, I]. along: "inputs", of words [I / 8, O]; "outputs", of words
    [I, O / 8] in AWQ's order."""
    inputs, outputs = (len(words) * 8, words.shape[1]) if along == "inputs" else (len(words), words.shape[1] * 8)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    ops.op(SOURCE, f"unpack_along_{along}")(words, codes, outputs, inputs)
    return codes
