"""GEMMs whose sum over a tensor group is wanted: parts of the outputs go straight to the ranks that add them up.

A rank adds up one share of the outputs' columns. The GEMM writes every other rank's share into that one's memory,
over the wire while it still multiplies, as one strided GEMM over all ranks' regions; a kernel adds up what has come
and fetches the other shares' sums. That hides most of a sum's first half, after Flux (Chang et al. 2024, arXiv
2406.06858).

Four H200 (2026-11-22), rows of 8192, us in a CUDA graph, a GEMM and its sum with the norm, one after the other and
so: 7168 inputs, 192 rows 67.2 and 59.2, 256 76.7 and 71.6, 384 105.7 and 99.4, 512 137.1 and 127.6; 2048 inputs, 256
rows 48.0 and 42.9, 512 79.0 and 72.8. Up to allreduce.SENT bytes sums are sent, which is as fast or faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..collective.allreduce import BLOCKS, MAX_THREADS, RECV_BUFFER, SENT, SymmetricMemory, recv_buffer_at
from ..collective.allreduce_norm import norm_kernel
from .cublaslt import ALIGNED, GemmShape, in_use, library_for


def sizes(weight: Tensor, peers: SymmetricMemory, bias: bool = False) -> GemmShape:
    """Sizes of GEMMs whose sums these ranks scatter. bias: this rank adds one."""
    outputs, inputs = weight.shape
    return GemmShape(weight.dtype, outputs, inputs, peers.size, peers.stride // weight.element_size(), bias=bias)


def address(rows: int, weight: Tensor, peers: SymmetricMemory) -> int:
    """Address of this rank's part of the first rank's share; the next rank's is a stride further."""
    recv_buffer = peers.base + recv_buffer_at(peers.size)
    return recv_buffer + peers.rank * rows * (len(weight) // peers.size) * weight.element_size()


def supports(rows: int, weight: Tensor, peers: SymmetricMemory) -> bool:
    """Whether so many rows' GEMMs scatter their sums: they fit, aligned, and are not summed faster otherwise.

    The borders were measured on four H200 alone.
    """
    width = len(weight) * weight.element_size()
    aligned = width % (16 * peers.size) == 0 and rows * width // peers.size % ALIGNED == 0
    return peers.size > 2 and aligned and SENT < rows * width <= RECV_BUFFER


def measured(device: torch.device) -> list[tuple[int, int, int, bool]]:
    """Outputs, inputs and rows of the GEMMs that may go there, and whether they do. A rank that takes others than its
    group would get wrong sums, as all kernels of a group use the same barriers. Only one rank adds biases: its GEMMs of
    a size are two, which are one here if both go there."""
    library = in_use.get(device)
    scattered = [(sizes, row) for sizes, row in library.choices.items() if sizes.parts > 1] if library else []
    return sorted({(s.outputs, s.inputs, rows, bool(algo)) for s, row in scattered for rows, algo in row.items()})


def gemm_reduce_scatter(x: Tensor, weight: Tensor, peers: SymmetricMemory, bias: Tensor | None = None) -> Tensor | None:
    """Begin the group's sum of x [T, I] times the transpose of weight [O, I], plus this rank's bias [O];
    reduce_add_norm has to end it before the next one begins.

    Returns what reduce_add_norm takes: this rank's receive buffer as [T, O], which will hold its share of all ranks'
    parts. None: nothing has begun, as no algorithm was measured for so many rows. All callers have compared `measured`.
    """
    library = in_use.get(x.device)
    rows, wanted = len(x), sizes(weight, peers, bias is not None)
    if library is None or x.dtype != weight.dtype or not library.choices.get(wanted, {}).get(rows):
        return None
    plan = library.plan(wanted, rows) if library_for(x, weight, bias) else None
    if plan is None or not library.run(plan, x, weight, address(rows, weight, peers), bias):
        raise RuntimeError(f"cuBLASLt refuses {rows} rows times {wanted}, which it has measured")
    return peers.recv_buffer.view(x.dtype)[: rows * len(weight)].view(rows, len(weight))


def reduce_add_norm(
    received: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: SymmetricMemory, blocks: int = BLOCKS
) -> tuple[Tensor, Tensor]:
    """allreduce.all_reduce_add_norm of what the GEMM has begun; the norm is a tensor of its own."""
    rows, width = residual.shape
    x = torch.empty_like(residual)
    share = width // peers.size
    kernel, threads = norm_kernel("received_add_norm", residual, weight, peers, share, MAX_THREADS, x)
    grid = min(rows, blocks, peers.blocks), 1, 1
    kernel(grid, threads, received, x, residual, weight, peers.table, peers.rank, rows, eps)
    return x, residual
