"""Linears on GPUs whose weights are quantised, in pieces of 16 outputs in the order in which tensor cores take them.

So a lane gets its codes of a piece by one access, from memory or from shared memory, and a strip of 16 outputs is one
run of memory, which bulk copies bring. A format says how its pieces look: a header of this folder, and a `Layout`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..activation.activation import gated_activation
from ..device import DeviceCaps, device_caps
from . import grouped_gemv, quantized_gemm, quantized_gemv, quantized_wgmma
from .grouped_gemv import GroupedConfig
from .quantized_gemm import TileConfig
from .quantized_gemv import GemvConfig
from .quantized_wgmma import STRIP, WgmmaConfig, WgmmaParts

GEMV_ROWS = 4  # more are faster by quantized_gemm.cu, of most formats


class Layout(NamedTuple):
    """How pieces of a format look to the kernels."""

    header: str  # the file that knows them, which stands for FORMAT in the kernels' sources
    inputs: int  # of a piece
    bytes: int  # of a piece
    widening: float  # cycles of a multiprocessor to make weights of 16 inputs of an output, roughly
    sizes: tuple[tuple[str, int], ...] = ()  # constants of the header
    gemv_rows: int = GEMV_ROWS  # more are faster by quantized_gemm.cu
    chunk: int = 0  # inputs of a chunk, of which fewer are slow to copy
    alike: int = 1  # pieces along the inputs that have the same scales
    streamed: int = 0  # inputs that quantized_experts.cu streams at a time, where these are not a piece's

    @property
    def constants(self) -> dict[str, jit.Size]:
        """What stands for the format in the kernels' sources."""
        return {"FORMAT": self.header, **dict(self.sizes)}


class Packed(NamedTuple):
    """A weight [O, I] as pieces: uint8 [ceil(O / 16), I / layout.inputs, layout.bytes]; outputs past O are zeros."""

    pieces: Tensor
    outputs: int
    layout: Layout

    @property
    def inputs(self) -> int:
        return self.pieces.shape[1] * self.layout.inputs

    def part(self, first: int, last: int) -> Packed:
        """Outputs first to last; first is a strip's."""
        return self._replace(pieces=self.pieces[first // STRIP : -(-last // STRIP)], outputs=last - first)


KernelConfig = GemvConfig | GroupedConfig | TileConfig | WgmmaConfig | WgmmaParts


def takes(x: Tensor, packed: Packed, bias: Tensor | None) -> bool:
    """Whether kernels that read pieces take x [T, I] and bias [O]."""
    typed = x.dtype in (torch.bfloat16, torch.float16) and (bias is None or bias.dtype == x.dtype)
    return x.is_cuda and x.dim() == 2 and typed and jit.plain(x, packed.pieces)


def supports(x: Tensor, packed: Packed, bias: Tensor | None = None) -> bool:
    """Whether `linear` takes x [T, I] and bias [O], and is faster than dequantize_pieces.py and a GEMM."""
    return takes(x, packed, bias) and _plan(len(x), packed, "", device_caps(x.device))[0] is not None


def linear(x: Tensor, packed: Packed, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of the weight [O, I], plus bias [O], where `supports` says so; accumulated in f32.

    gate: an activation of the first half of the outputs times the second half; "": the outputs as they are.
    """
    config, fused = _plan(len(x), packed, gate, device_caps(x.device))
    assert config is not None, "supports() was not asked"
    if isinstance(config, GemvConfig):
        y = quantized_gemv.gemv(x, packed, config, fused, bias)
    elif isinstance(config, GroupedConfig):
        y = grouped_gemv.gemv(x, packed, config, fused, bias)
    elif isinstance(config, WgmmaConfig):
        y = quantized_wgmma.gemm(x, packed, config, fused, bias)
    elif isinstance(config, WgmmaParts):
        y = quantized_wgmma.gemm_in_parts(x, packed, config, fused, bias)
    else:
        y = quantized_gemm.gemm(x, packed, config, fused, bias)
    return y if fused == gate else gated_activation(y, gate)


def variants(
    rows: Iterable[int], packed: object, dtype: torch.dtype, gate: str, bias: bool, found: DeviceCaps
) -> Iterator[jit.KernelVariant]:
    """What the GEMM of so many rows, each, is compiled as; nothing of a weight that is not in pieces."""
    if not isinstance(packed, Packed):
        return
    for n in rows:
        config, fused = _plan(n, packed, gate, found)
        if isinstance(config, GemvConfig):
            sizes = quantized_gemv.sizes(n, packed.inputs, config, fused, bias, packed.layout)
            yield jit.variant("quantized_gemv", dtype, **sizes)
        elif isinstance(config, GroupedConfig):
            sizes = grouped_gemv.sizes(n, packed.inputs, config, fused, bias, packed.layout)
            yield jit.variant("grouped_gemv", dtype, **sizes)
        elif isinstance(config, WgmmaConfig | WgmmaParts):
            for one in (config,) if isinstance(config, WgmmaConfig) else (config.first, config.rest):
                sizes = quantized_wgmma.sizes(packed.inputs, one, fused, bias, packed.layout)
                yield jit.variant("quantized_wgmma", dtype, **sizes)
        elif config:
            sizes = quantized_gemm.sizes(n, packed.inputs, config, fused, bias, packed.layout)
            yield jit.variant("quantized_gemm", dtype, **sizes)


def _plan(rows: int, packed: Packed, gate: str, found: DeviceCaps) -> tuple[KernelConfig | None, str]:
    """How the GEMM is computed, and the gate if that takes it: not where its halves share a strip."""
    sizes = packed.outputs, packed.inputs, packed.layout
    if gate and packed.outputs % (2 * STRIP) == 0:
        config = choose(rows, *sizes, True, found)
        if config:
            return config, gate
    return choose(rows, *sizes, False, found), ""


@functools.cache
def choose(rows: int, outputs: int, inputs: int, layout: Layout, gated: bool, found: DeviceCaps) -> KernelConfig | None:
    """The fastest kernel for these sizes; None: weights are dequantised first."""
    if found.hopper and rows in quantized_wgmma.ROWS and inputs % max(quantized_wgmma.LENGTHS[-1], layout.inputs) == 0:
        return quantized_wgmma.choose(rows, outputs, inputs, layout, gated, found.num_sms)
    if not 0 < rows <= quantized_gemm.MOST_ROWS:
        return None
    if found.has_tma and (by_groups := grouped_gemv.choose(rows, inputs, layout, gated)):
        return by_groups
    config = quantized_gemv.choose(rows, outputs, inputs, layout, gated, found.num_sms)
    if config and (rows <= layout.gemv_rows or not found.has_tma or inputs % quantized_gemm.LENGTHS[-1]):
        return config
    return quantized_gemm.choose(rows, outputs, inputs, layout, gated, found.num_sms) if found.has_tma else None
