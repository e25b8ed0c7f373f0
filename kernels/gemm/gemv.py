"""The kernel gemv.cu: GEMMs of a row or two, which may norm them before."""

from __future__ import annotations

from torch import Tensor

from .. import jit
from ..activation.activation import gate_sizes
from ..device import DeviceCaps, device_caps

SHARED = 96 << 10  # bytes of shared memory for x: two blocks must fit on a multiprocessor
WARPS = 8  # of a block
NORMED = 8192  # elements of x that a block has registers for to norm them


def gemv(
    x: Tensor,
    weight: Tensor,
    gate: str = "",
    bias: Tensor | None = None,
    norm: tuple[Tensor, Tensor, float, Tensor] | None = None,
    config: tuple[int, int] | None = None,
) -> Tensor:
    """x [T, I] times the transpose of weight [O, I], as skinny.skinny_linear.

    norm: of x and this residual, by this weight and epsilon, which leaves their sum here.
    config: outputs of a warp, two with a `gate`, and accesses to each row that it has under way; chosen unless given.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    outs, ahead = config or choose(rows, outputs, device_caps(x.device), gate)
    y = x.new_empty(rows, outputs // 2 if gate else outputs)
    kernel = jit.kernel(
        "gemv", "gemv", x.dtype, x.nbytes,
        **sizes(rows, inputs, outs, ahead, gate, bias is not None, norm is not None),
    )  # fmt: skip
    residual, norm_weight, eps, total = norm or (x, x, 0.0, x)  # what a kernel without does not touch
    grid = outputs // (WARPS * outs), 1, 1
    kernel(
        grid, WARPS * 32, x, weight, x if bias is None else bias, y, outputs, residual, norm_weight, float(eps),
        total, shared=x.nbytes,
    )  # fmt: skip
    return y


def choose(rows: int, outputs: int, found: DeviceCaps, gate: str) -> tuple[int, int]:
    """Outputs of a warp, and how many accesses it has under way: two where all blocks are there at once, two on each
    multiprocessor."""
    at_once = outputs <= 2 * WARPS * 2 * found.num_sms
    return (2, 4) if rows > 1 or gate or at_once else (1, 8)


def sizes(rows: int, inputs: int, outs: int, ahead: int, gate: str, bias: bool, norm: bool) -> dict[str, int]:
    """What it is compiled for."""
    return dict(
        I=inputs,
        R=rows,
        OUTS=outs,
        AHEAD=ahead,
        **gate_sizes(gate),
        BIAS=int(bias),
        NORM=int(norm),
        WARPS=WARPS,
    )
