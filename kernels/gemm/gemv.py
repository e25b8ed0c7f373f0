"""The kernel gemv.cu: GEMMs of a row or two."""

from __future__ import annotations

from torch import Tensor

from .. import jit
from ..activation.activation import gate_sizes
from ..candidate import Candidate
from ..device import DeviceCaps, device_caps

ROWS = 2  # at most: more are faster on tensor cores
INPUTS, OUTPUTS = 512, 64  # of which the weight's are multiples
SHARED = 96 << 10  # bytes of shared memory for x: two blocks must fit on a multiprocessor
WARPS = 8  # of a block


def readable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether kernels of 16 bits can read x [T, I], weight [O, I] and bias [O], aligned and on a GPU."""
    same = x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    return x.is_cuda and x.dim() == 2 and x.element_size() == 2 and same and jit.plain(x, weight)


def takes(rows: int, outputs: int, inputs: int) -> bool:
    whole = inputs % INPUTS == 0 and outputs % OUTPUTS == 0
    return 0 < rows <= ROWS and whole and rows * inputs * 2 <= SHARED


def supports(x: Tensor, weight: Tensor, gate: str = "", bias: Tensor | None = None) -> bool:
    return takes(len(x), *weight.shape) and readable(x, weight, bias)


def variant(rows: int, weight: Tensor, gate: str, bias: bool, caps: DeviceCaps) -> jit.KernelVariant | None:
    outputs, inputs = weight.shape
    if weight.element_size() != 2 or not takes(rows, outputs, inputs):
        return None
    how = *choose(rows, outputs, caps, gate), gate, bias
    return jit.variant("gemv", weight.dtype, **sizes(rows, inputs, *how))


def gemv(
    x: Tensor, weight: Tensor, gate: str = "", bias: Tensor | None = None, config: tuple[int, int] | None = None
) -> Tensor:
    """x [T, I] times the transpose of weight [O, I], plus bias [O], where `supports` is true; accumulated in f32.

    gate: an activation of the first half of the outputs times the second half; "": the outputs as they are.
    config: outputs of a warp, two with a `gate`, and accesses to each row that it has under way; chosen unless given.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    outs, ahead = config or choose(rows, outputs, device_caps(x.device), gate)
    y = x.new_empty(rows, outputs // 2 if gate else outputs)
    made = sizes(rows, inputs, outs, ahead, gate, bias is not None)
    kernel = jit.kernel("gemv", "gemv", x.dtype, x.nbytes, **made)
    args = x, weight, x if bias is None else bias, y, outputs
    kernel((outputs // (WARPS * outs), 1, 1), WARPS * 32, *args, shared=x.nbytes)
    return y


def choose(rows: int, outputs: int, caps: DeviceCaps, gate: str) -> tuple[int, int]:
    """Outputs of a warp, and how many accesses it has under way: two where all blocks are there at once, two on each
    multiprocessor."""
    at_once = outputs <= 2 * WARPS * 2 * caps.num_sms
    return (2, 4) if rows > 1 or gate or at_once else (1, 8)


def sizes(rows: int, inputs: int, outs: int, ahead: int, gate: str, bias: bool) -> dict[str, int]:
    """Compile-time constants of gemv.cu."""
    return dict(I=inputs, R=rows, OUTS=outs, AHEAD=ahead, **gate_sizes(gate), BIAS=int(bias), WARPS=WARPS)


CANDIDATE = Candidate(
    "gemv.cu", "GPUs",
    f"up to {ROWS} rows of f16 or bf16, inputs a multiple of {INPUTS}, outputs of {OUTPUTS}", supports, gemv, variant,
)  # fmt: skip
