"""Stacks in the forms that kernels for CPUs read, made into those of kernels for GPUs: by torch, wherever they lie.

Experts in host memory lie there as CPUs read them, and cross PCIe so. No number is decoded: what the tables of the
one layout hold is laid out as the other has it. Forms that are the same on both, or that torch dequantises on both,
stay as they are.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cpu_layouts, cuda_layouts, e4m3_cpu, floats, packed_gemm
from .floats import Floats
from .ggml_types import Decoded
from .stack import Stack, flat, padded

CHUNK = 16 << 20  # bytes that are repacked at once: what that takes beside them is a few times as much


class Parts(NamedTuple):
    """The memory of a stack of E experts, and how to build a stack from other memory."""

    tensors: list[Tensor]  # [E, ...] each
    stack: Any

    @property
    def key(self) -> Hashable:
        """Equal of stacks whose experts look alike."""
        packed = self.stack.packed if isinstance(self.stack, Stack) else ()
        rest = tuple(one for one in packed if not isinstance(one, Tensor | int))  # without the number of outputs
        shapes = tuple((*x.shape[1:], x.dtype) for x in self.tensors)
        return type(self.stack), type(packed), shapes, rest

    def of(self, tensors: list[Tensor]) -> Any:
        """A stack like this one of tensors [n, ...]."""
        if isinstance(self.stack, Tensor):
            return tensors[0]
        if isinstance(self.stack, Floats):
            return Floats(*tensors)
        (_, outputs, inputs), packed, count = self.stack.shape, self.stack.packed, len(tensors[0])
        rest = iter(tensors)
        made = [next(rest) if isinstance(one, Tensor) else one for one in packed]
        return Stack(flat(type(packed), made, count * padded(outputs)), (count, outputs, inputs))


def parts(stack: Any) -> Parts:
    """The parts of a stack that is plain or quantised, with one expert or more."""
    if isinstance(stack, Tensor):
        return Parts([stack], stack)
    if isinstance(stack, Floats):
        return Parts(list(stack), stack)
    return Parts([one.unflatten(0, (stack.shape[0], -1)) for one in stack.tensors], stack)


def repack_for_gpu(stack: Any) -> Any:
    """The weights [E, O, I] repacked for GPUs, if their sizes have a layout there; those of others have become plain
    before. Small next to the memory that it takes meanwhile: see CHUNK."""
    packed = stack.packed if isinstance(stack, Stack) else None
    if isinstance(packed, e4m3_cpu.Packed):
        made = floats.pack_for_gpus(Floats(*(one.mT.flatten(0, 1) for one in (packed.codes, packed.scales))))
    elif isinstance(packed, cpu_layouts.Packed):
        made = _tiles(packed.layout, packed.layout.tables.unpack(packed.blocks))
    else:
        return stack
    return Stack(made._replace(outputs=packed.outputs), stack.shape)


def _tiles(layout: cpu_layouts.Layout, tables: dict[str, Tensor]) -> packed_gemm.Packed:
    """Numbers of a layout for CPUs in that for GPUs."""
    if layout is cpu_layouts.Q8_0:
        return cuda_layouts.pack(cuda_layouts.Q8_0, **tables)
    if layout is cpu_layouts.MXFP4:
        return cuda_layouts.pack(cuda_layouts.MXFP4, **tables)
    codes = tables.pop("codes")
    if layout.form is None:
        of_scale = 64 if layout.inputs % 64 == 0 else 32
        each = {name: one.repeat_interleave(layout.inputs // of_scale, 1) for name, one in tables.items()}
        return cuda_layouts.pack(cuda_layouts.int4(of_scale, "zeros" in tables), codes, **each)
    scales, minima = tables["numbers"].view(torch.int8).unflatten(1, (-1, 2)).unbind(2)
    decoded = Decoded(codes, tables["factors"].unflatten(1, (-1, 2)), scales, minima)
    return cuda_layouts.pack_super_blocks(decoded, layout.form)
