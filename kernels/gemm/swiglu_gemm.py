"""A feed-forward layer's first half for thousands of rows on Hopper: two GEMMs and what joins them in one kernel."""

from __future__ import annotations

from torch import Tensor

from .. import jit
from ..activation.activation import ACTIVATIONS
from ..device import device_caps

FROM = 1024  # rows; of fewer the library's GEMM and an activation are the faster ones
MOST_INPUTS = 4096  # of 8192 they are as fast, too, as a tile's sums take so long that its end counts less
OUTPUTS, INPUTS = 128, 64  # of a block's tile, of a chunk
ROWS = 128
STAGES = 4
SHARED = 1024 + STAGES * (ROWS + 2 * OUTPUTS) * INPUTS * 2


def supports(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `swiglu_gemm` takes x [T, I], weight [2 O, I] and bias [2 O], and is the faster one."""
    if not x.is_cuda or x.dim() != 2 or x.element_size() != 2 or x.dtype != weight.dtype or x.shape[0] < FROM:
        return False
    if bias is not None and (bias.dtype != x.dtype or not jit.plain(bias)):
        return False
    outputs, inputs = weight.shape
    whole = outputs % (2 * OUTPUTS) == 0 and inputs % INPUTS == 0
    return jit.plain(x, weight) and whole and inputs <= MOST_INPUTS and device_caps(x.device).hopper


def swiglu_gemm(x: Tensor, weight: Tensor, activation: str = "silu", bias: Tensor | None = None) -> Tensor:
    """act(x G^T) * (x U^T): [T, O] where weight [2 O, I] is G over U, and bias [2 O] is added before; where it
    `supports` them; accumulated in f32."""
    (rows, inputs), outputs = x.shape, weight.shape[0] // 2
    y = x.new_empty(rows, outputs)
    act, biased = ACTIVATIONS.index(activation), int(bias is not None)
    sizes = dict(I=inputs, OUTPUTS=outputs, STAGES=STAGES, ACT=act, BIAS=biased)
    kernel = jit.kernel("swiglu_gemm", "swiglu_gemm", x.dtype, SHARED, **sizes)
    of_x = jit.tensor_map(x.data_ptr(), rows, inputs, ROWS, inputs)
    of_w = jit.tensor_map(weight.data_ptr(), 2 * outputs, inputs, OUTPUTS, inputs)
    pairs = device_caps(x.device).num_sms // 2
    tiles = -(-rows // (2 * ROWS)) * (outputs // OUTPUTS)
    kernel((2 * min(pairs, tiles), 1, 1), 384, of_x, of_w, x if bias is None else bias, y, rows, shared=SHARED)
    return y
