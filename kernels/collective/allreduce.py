"""Sums over the GPUs of one host that map each other's memory: one kernel, nothing of the host's in it.

One-shot: every rank reads all of every other's input, one barrier. Two-shot: every rank adds up one share and reads
the others' sums: two barriers and, of 4 ranks, half the bytes (barrier.cuh).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import jit

SLOT = 8 << 20  # bytes that one call can sum
SENT = 2 << 20  # bytes up to which, of more than two ranks and with the norm, to write shares to the others is faster
INBOX = 2 * SLOT - SENT  # and SENT are an LL buffer: for all of two ranks' input, or for shares and then their sums
# Thresholds for more than two ranks:
ONE_SHOT = 128 << 10  # bytes above which to share the sum is faster
BLOCKS = 64  # of THREADS, at once on every GPU, beside what else is there
MAX_BLOCKS = 128  # that a call may have; of MAX_THREADS no more than SymmetricMemory.blocks
THREADS = 512
MAX_THREADS = 1024
MAX_RANKS = 8
RECV_BUFFER = SLOT  # bytes of a region where others' parts of a GEMM arrive, of gemm_reduce_scatter.py
BUFFER_SIZES = {"SLOT": SLOT, "INBOX": INBOX, "SENT": SENT, "BLOCKS": MAX_BLOCKS}  # constants of the kernels


def recv_buffer_at(size: int) -> int:
    """Offset of the receive buffer in a region of `size` ranks: behind two slots, the Signals, two LL buffers."""
    return 2 * SLOT + 4 * MAX_BLOCKS * (1 + size) + 2 * (INBOX + SENT)


def region_bytes(size: int) -> int:
    """Bytes that each of `size` ranks gives to the group."""
    return recv_buffer_at(size) + RECV_BUFFER


@dataclass(frozen=True)
class SymmetricMemory:
    """The group's regions as one rank has mapped them: rank r's at base + r * stride, in bytes, on the current device.

    They are zero before the first call.
    """

    rank: int
    size: int
    base: int
    stride: int
    blocks: int = BLOCKS  # of MAX_THREADS that all ranks' GPUs hold at once, up to MAX_BLOCKS

    @functools.cached_property
    def table(self) -> Tensor:
        """[ranks] int64 on the GPU: addresses in rank order."""
        return torch.tensor([self.base + r * self.stride for r in range(self.size)], device="cuda")

    @functools.cached_property
    def recv_buffer(self) -> Tensor:
        """[RECV_BUFFER] uint8: this rank's."""
        return memory(self.base + self.rank * self.stride + recv_buffer_at(self.size), RECV_BUFFER)


def common_blocks(num_sms: Iterable[int]) -> int:
    """SymmetricMemory.blocks of GPUs with so many multiprocessors, each of which holds one block of MAX_THREADS."""
    return min([MAX_BLOCKS, *num_sms])


class _Memory:
    """An array on the current device for torch (CUDA Array Interface, version 3)."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = dict(shape=(size,), typestr="|u1", data=(address, False), version=3)


def memory(address: int, size: int) -> Tensor:
    """[size] uint8: what lies there on the current device, which somebody else keeps."""
    return torch.as_tensor(_Memory(address, size), device="cuda")


def supports(x: Tensor, ranks: int) -> bool:
    """Whether `all_reduce` takes x. The same on all ranks."""
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16) and x.nbytes <= SLOT and ranks <= MAX_RANKS


def all_reduce(x: Tensor, peers: SymmetricMemory) -> Tensor:
    """The sum of x over the group, in place; accumulated in f32 in rank order, so that all ranks get the same bits.

    x is contiguous and `supports` is true. Every rank calls the same in the same order, on one stream.
    """
    if peers.size > 2 and x.nbytes > ONE_SHOT and x.numel() % peers.size == 0:
        return two_shot(x, peers)
    return one_shot(x, peers)


def one_shot(x: Tensor, peers: SymmetricMemory, blocks: int = BLOCKS, threads: int = 0) -> Tensor:
    """`all_reduce` by at most `blocks` <= MAX_BLOCKS blocks of `threads`, or as many as fit."""
    vector = jit.vector(x, x.numel())
    return _launch("one_shot", x, peers, vector, x.numel() // vector, blocks, threads)


def two_shot(x: Tensor, peers: SymmetricMemory, blocks: int = BLOCKS, threads: int = 0) -> Tensor:
    """The same, of a number of elements that the ranks divide."""
    share = x.numel() // peers.size
    vector = jit.vector(x, share)
    return _launch("two_shot", x, peers, vector, share // vector, blocks, threads)


def _launch(name: str, x: Tensor, peers: SymmetricMemory, vector: int, items: int, blocks: int, threads: int) -> Tensor:
    # Small blocks as long as all of them can be there: more multiprocessors ask at once.
    threads = threads or next((t for t in (128, 256) if items <= blocks * t), THREADS)
    kernel = jit.kernel("allreduce", name, x.dtype, SIZE=peers.size, V=vector, THREADS=threads, **BUFFER_SIZES)
    grid = min(-(-items // threads), blocks), 1, 1
    kernel(grid, threads, x, peers.table, peers.rank, x.numel() // vector)
    return x


def all_reduce_reference(parts: list[Tensor]) -> Tensor:
    """The result on every rank where rank i has parts[i]."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
