"""GEMVs of up to eight rows with quantised weights in pieces, on any GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .. import jit
from ..activation.activation import gate_sizes
from .quantized_wgmma import STRIP

if TYPE_CHECKING:
    from .pieces_cuda import Layout, Packed

MOST_ROWS = 8
WARPS = 8
SHARED = 80 << 10  # bytes of a block: two fit on a multiprocessor of sm_80
LARGE = 800  # bytes of a piece above which a lane's registers hold half as many


class GemvConfig(NamedTuple):
    """How quantized_gemv.cu shares out a GEMV."""

    strips: int  # of a block
    ahead: int  # pieces of each that a warp has under way
    blocks: int  # that fit on a multiprocessor


def choose(rows: int, outputs: int, inputs: int, layout: Layout, gated: bool, num_sms: int) -> GemvConfig | None:
    """None: the kernel does not take so many rows, or x does not fit."""
    strips = -(-outputs // STRIP)
    config = GemvConfig(2, 4, 2) if gated or strips > 24 * num_sms else GemvConfig(1, 8, 2)
    if layout.bytes > LARGE:
        config = config._replace(ahead=config.ahead // 2)
    return config if rows <= MOST_ROWS and shared(rows, inputs, config.strips) <= SHARED else None


def gemv(x: Tensor, packed: Packed, config: GemvConfig, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """Of up to MOST_ROWS rows; a gate takes two strips."""
    rows, inputs = x.shape
    memory = shared(rows, inputs, config.strips)
    y = x.new_empty(rows, packed.outputs // 2 if gate else packed.outputs)
    of = sizes(rows, inputs, config, gate, bias is not None, packed.layout)
    kernel = jit.kernel("quantized_gemv", "quantized_gemv", x.dtype, memory, **of)
    blocks = -(-len(packed.pieces) // config.strips)
    args = x, packed.pieces, x if bias is None else bias, y, packed.outputs
    kernel((blocks, 1, 1), WARPS * 32, *args, shared=memory)
    return y


def shared(rows: int, inputs: int, strips: int) -> int:
    """Bytes of shared memory, as quantized_gemv.cu lays it out."""
    return rows * (inputs * 2 + 16) + WARPS * strips * 512


def sizes(rows: int, inputs: int, config: GemvConfig, gate: str, bias: bool, layout: Layout) -> dict[str, jit.Size]:
    """What quantized_gemv.cu is compiled for."""
    return dict(
        **layout.constants,
        I=inputs,
        R=rows,
        STRIPS=config.strips,
        AHEAD=config.ahead,
        WARPS=WARPS,
        BLOCKS=config.blocks,
        **gate_sizes(gate),
        BIAS=int(bias),
    )
