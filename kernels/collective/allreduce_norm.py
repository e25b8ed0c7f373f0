"""Sums over the GPUs of one host with the norm of what they add to: one kernel.

Two-shot: as allreduce.py's. In two more, ranks push to the others, who wait for data alone (LL). One-way push: all
of a rank's input to every other one. Push: shares, as two-shot, and then their sums.
"""

from __future__ import annotations

import functools

from torch import Tensor

from .. import jit
from ..norm.norm import add_rms_norm_reference
from . import allreduce
from .allreduce import BLOCKS, BUFFER_SIZES, INBOX, MAX_THREADS, SENT, THREADS, SymmetricMemory, all_reduce_reference

FEW = 2  # rows of more than two ranks that are summed and normed faster one after the other


def all_reduce_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: SymmetricMemory
) -> tuple[Tensor, Tensor]:
    """allreduce.all_reduce of x and norm.add_rms_norm of the sum as one kernel, with the same bits. x, residual:
    [T, H]."""
    if peers.size == 2:
        return one_way_push_add_norm(x, residual, weight, eps, peers, peers.blocks)
    if supports_push(x, peers.size):
        return push_add_norm(x, residual, weight, eps, peers, peers.blocks, MAX_THREADS)
    return two_shot_add_norm(x, residual, weight, eps, peers)


def supports(x: Tensor, ranks: int) -> bool:
    """Whether that is faster than two kernels; of more than two ranks a row or two are not enough for their blocks."""
    return allreduce.supports(x, ranks) and (ranks == 2 or len(x) > FEW)


def supports_push(x: Tensor, ranks: int) -> bool:
    """Whether an LL buffer has room; not for rows that are very short for so many ranks, of which some get whole
    vectors of up to 16 bytes and others none."""
    return x.nbytes <= SENT and x.nbytes + len(x) * ranks * 16 <= INBOX


def supports_one_way_push(x: Tensor, ranks: int) -> bool:
    """Whether an LL buffer has room for all of everybody's."""
    return x.nbytes * ranks <= INBOX + SENT


def _add_norm(
    name: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: SymmetricMemory, blocks: int = BLOCKS,
    threads: int = THREADS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`all_reduce_add_norm` by one kernel, with at most `blocks` <= MAX_BLOCKS blocks of `threads`."""
    assert TAKES[name](x, peers.size)
    kernel, threads = norm_kernel(name, residual, weight, peers, residual.shape[-1], threads, x)
    rows = len(x)
    kernel((min(rows, blocks), 1, 1), threads, x, residual, weight, peers.table, peers.rank, rows, eps)
    return x, residual


TAKES = {
    "one_way_push_add_norm": supports_one_way_push,
    "two_shot_add_norm": allreduce.supports,
    "push_add_norm": supports_push,
}
one_way_push_add_norm = functools.partial(_add_norm, "one_way_push_add_norm")
two_shot_add_norm = functools.partial(_add_norm, "two_shot_add_norm")  # each rank adds up a share of a row's columns
push_add_norm = functools.partial(_add_norm, "push_add_norm")


def norm_kernel(
    name: str, residual: Tensor, weight: Tensor, peers: SymmetricMemory, length: int, threads: int, *others: Tensor
) -> tuple[jit.Kernel, int]:
    """A kernel of allreduce_norm.cu with vectors that divide `length` elements, and its threads, at most so many."""
    width = residual.shape[-1]
    vector = jit.common_vector((residual, weight, *others), length)
    threads = min(max(-(-width // vector // 32) * 32, 32), threads)
    sizes = dict(SIZE=peers.size, N=width, V=vector, THREADS=threads, **BUFFER_SIZES)
    return jit.kernel("allreduce_norm", name, residual.dtype, **sizes), threads


def all_reduce_add_norm_reference(
    parts: list[Tensor], residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return add_rms_norm_reference(all_reduce_reference(parts), residual, weight, eps)
