"""A feed-forward layer's first half for thousands of rows on Hopper: two GEMMs and what joins them in one kernel."""

from __future__ import annotations

from torch import Tensor

from .. import jit
from ..activation.activation import act_number
from ..candidate import Candidate
from ..device import device_caps
from .gemv import readable

FROM = 1024  # rows; of fewer the library's GEMM and an activation are the faster ones
MAX_INPUTS = 4096  # of 8192 they are as fast, too, as a tile's sums take so long that its end counts less
OUTPUTS, INPUTS = 128, 64  # of a block's tile, of a chunk
ROWS = 128
STAGES = 4
SHARED = 1024 + STAGES * (ROWS + 2 * OUTPUTS) * INPUTS * 2


def supports(x: Tensor, weight: Tensor, gate: str = "silu", bias: Tensor | None = None) -> bool:
    outputs, inputs = weight.shape
    whole = outputs % (2 * OUTPUTS) == 0 and inputs % INPUTS == 0 and inputs <= MAX_INPUTS
    if not gate or len(x) < FROM or not whole or not readable(x, weight, bias):
        return False
    return (bias is None or jit.plain(bias)) and device_caps(x.device).hopper


def swiglu_gemm(x: Tensor, weight: Tensor, activation: str = "silu", bias: Tensor | None = None) -> Tensor:
    """act(x G^T) * (x U^T): [T, O] where weight [2 O, I] is G over U, and bias [2 O] is added before; where it
    `supports` them; accumulated in f32."""
    (rows, inputs), outputs = x.shape, weight.shape[0] // 2
    y = x.new_empty(rows, outputs)
    act, biased = act_number(activation), int(bias is not None)
    sizes = dict(I=inputs, OUTPUTS=outputs, STAGES=STAGES, ACT=act, BIAS=biased)
    kernel = jit.kernel("swiglu_gemm", "swiglu_gemm", x.dtype, SHARED, **sizes)
    of_x = jit.tensor_map(x.data_ptr(), rows, inputs, ROWS, inputs)
    of_w = jit.tensor_map(weight.data_ptr(), 2 * outputs, inputs, OUTPUTS, inputs)
    pairs = device_caps(x.device).num_sms // 2
    tiles = -(-rows // (2 * ROWS)) * (outputs // OUTPUTS)
    kernel((2 * min(pairs, tiles), 1, 1), 384, of_x, of_w, x if bias is None else bias, y, rows, shared=SHARED)
    return y


CANDIDATE = Candidate(
    "swiglu_gemm.cu", "sm_90",
    f"gated, from {FROM} rows on, f16 or bf16, up to {MAX_INPUTS} inputs, a multiple of {INPUTS}",
    supports, swiglu_gemm,
    gain="2.7 % of gate and up of 8192 rows, 4 % of their energy, which bounds prefill (docs/measurements/not-kept.md)",
)  # fmt: skip
