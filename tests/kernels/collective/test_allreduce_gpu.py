"""The kernels of all-reduces on one GPU: each rank is a stream with a region of its own, in this process.

Ranks on GPUs of their own are tests/comm/gpus.py's. Blocks wait for each other, so all ranks' blocks have to fit on the
GPU at once: 3 ranks of 64 blocks of 512 threads do from an A100 on where two of them fit on a multiprocessor, as those
of allreduce.cu do. Those of allreduce_norm.cu have more registers: with wide rows the ranks get FIT blocks.
"""

import random

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.collective import allreduce, allreduce_norm
from phalanx.kernels.collective.allreduce import INBOX, ONE_SHOT, SENT, SLOT, SymmetricMemory
from phalanx.kernels.gemm import gemm_reduce_scatter

from ...devices import require_gpu

require_gpu()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FIT = 96  # of all ranks, one to a multiprocessor


class Ranks:
    def __init__(self, size: int):
        self.size = size
        self.streams = [torch.cuda.Stream() for _ in range(size)]
        self.regions = torch.zeros(size, allreduce.region_bytes(size), dtype=torch.uint8, device="cuda")
        self.regions[:, : 2 * SLOT] = 0xFF  # NaN in every type
        base, stride = self.regions.data_ptr(), self.regions.stride(0)
        self.peers = [SymmetricMemory(rank, size, base, stride) for rank in range(size)]
        torch.cuda.synchronize()

    def each(self, call) -> None:
        """call(rank) on every rank's stream, slower ones first or last by turns."""
        for rank in range(self.size):
            with torch.cuda.stream(self.streams[rank]):
                call(rank)

    def warm(self, call) -> None:
        """Load what `call` needs: a module that is loaded while a rank already waits might wait for that rank."""
        real = jit.Kernel.__call__
        jit.Kernel.__call__ = lambda *args, **more: None
        try:
            self.each(call)
        finally:
            jit.Kernel.__call__ = real
        torch.cuda.synchronize()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce(size, dtype):
    """From one element to the limit and back, so that grids and kinds of calls change between calls."""
    ranks, most = Ranks(size), ONE_SHOT // dtype.itemsize
    counts = [
        0,
        1,
        2,
        3,
        7,
        8,
        33,
        4096,
        4097,
        40_000,
        most - 1,
        most,
        most + 8 * size,
        3 << 19,
        SLOT // dtype.itemsize,
    ]
    torch.manual_seed(0)
    for count in counts + counts[::-1] + [8] * 5:
        parts = list(torch.randn(size, count, device="cuda").to(dtype))
        want = allreduce.all_reduce_reference(parts)
        work = [part.clone() for part in parts]
        torch.cuda.synchronize()
        call = lambda rank, work=work: allreduce.all_reduce(work[rank], ranks.peers[rank])  # noqa: E731
        ranks.warm(call)
        ranks.each(call)
        torch.cuda.synchronize()
        for rank in range(size):
            assert torch.equal(work[rank], want), (count, rank)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("threads", [128, 256, 512])
def test_two_shot_by_blocks_of_any_size(size, threads):
    ranks = Ranks(size)
    torch.manual_seed(0)
    for count in (size, 33 * size, 4096 * size, 40_001 * size, (3 << 19) // size * size):
        parts = list(torch.randn(size, count, device="cuda").bfloat16())
        want = allreduce.all_reduce_reference(parts)
        torch.cuda.synchronize()

        def call(rank, parts=parts):
            allreduce.two_shot(parts[rank], ranks.peers[rank], FIT // size, threads)

        ranks.warm(call)
        ranks.each(call)
        torch.cuda.synchronize()
        assert all(torch.equal(part, want) for part in parts), count


SHAPES = [(0, 512), (1, 1), (3, 33), (65, 1000), (17, 8192), (64, 8192), (200, 512), (70, 2056)]


KINDS = allreduce_norm.two_shot_add_norm, allreduce_norm.push_add_norm, allreduce_norm.one_way_push_add_norm


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", SHAPES)
def test_all_reduce_add_norm(kind, size, dtype, rows, width):
    """Also of rows whose vectors the ranks do not divide."""
    ranks = Ranks(size)
    torch.manual_seed(0)
    for _ in range(3):
        parts = list(torch.randn(size, rows, width, device="cuda").to(dtype))
        residual, weight = (
            torch.randn(rows, width, device="cuda").to(dtype),
            torch.randn(width, device="cuda").to(dtype),
        )
        want = allreduce_norm.all_reduce_add_norm_reference(parts, residual.clone(), weight, 1e-5)
        work, streams = [p.clone() for p in parts], [residual.clone() for _ in parts]
        torch.cuda.synchronize()

        def call(rank, work=work, streams=streams, weight=weight):
            kind(work[rank], streams[rank], weight, 1e-5, ranks.peers[rank], FIT // size)

        ranks.warm(call)
        ranks.each(call)
        torch.cuda.synchronize()
        for rank in range(size):
            assert torch.equal(streams[rank], want[1]) and torch.equal(work[rank], work[0])
        bound = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(work[0].float(), want[0].float(), atol=bound, rtol=bound)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_with_norms_whose_sizes_change_from_call_to_call(size):
    """Nothing is left in the LL buffers, and what looks like nothing in them, all bits set, arrives as NaN."""
    ranks = Ranks(size)
    rng = random.Random(0)
    torch.manual_seed(0)
    for turn in range(40):
        rows, width = rng.choice(SHAPES[1:] + [(1024, 4096)] * (size == 2 and turn % 3 == 2))  # all of an LL buffer
        if rows * width * 2 > SENT:
            kinds = (allreduce_norm.two_shot_add_norm, allreduce_norm.one_way_push_add_norm)
        else:
            kinds = KINDS if turn % 5 == 4 else KINDS[1:]
        kind = kinds[turn % len(kinds)]
        parts = list(torch.randn(size, rows, width, device="cuda").bfloat16())
        nan = torch.zeros(rows, width, dtype=torch.bool, device="cuda")
        if turn % 2:
            nan[rng.randrange(rows), : rng.randrange(16)] = True
            parts[turn % size].view(torch.int16)[nan] = -1
        want = allreduce.all_reduce_reference(parts)
        streams = [torch.zeros_like(want) for _ in parts]
        weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()

        def call(rank, parts=parts, streams=streams, weight=weight, kind=kind):
            kind(parts[rank], streams[rank], weight, 1e-5, ranks.peers[rank], FIT // size)

        ranks.warm(call)
        ranks.each(call)
        torch.cuda.synchronize()
        for stream in streams:
            torch.testing.assert_close(stream, want, atol=0, rtol=0, equal_nan=True)
    end = allreduce.recv_buffer_at(size)
    assert not ranks.regions[:, end - 2 * (INBOX + SENT) : end].any()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, share", [(1, 8), (3, 104), (65, 1024), (300, 256)])
def test_sums_of_what_gemms_have_sent(size, dtype, rows, share):
    """Each rank has its share of all ranks' parts; what else lies there is NaN."""
    ranks, width = Ranks(size), size * share
    torch.manual_seed(0)
    for _ in range(3):
        parts = torch.randn(size, rows, width, device="cuda").to(dtype)
        residual, weight = (torch.randn(*s, device="cuda").to(dtype) for s in ((rows, width), (width,)))
        want = allreduce_norm.all_reduce_add_norm_reference(list(parts), residual.clone(), weight, 1e-5)
        landed, streams, normed = [], [residual.clone() for _ in range(size)], [None] * size
        for rank, peers in enumerate(ranks.peers):
            peers.recv_buffer.fill_(0xFF)
            landed.append(peers.recv_buffer.view(dtype)[: rows * width].view(size, rows, share))
            landed[-1].copy_(parts[:, :, rank * share : (rank + 1) * share])
        torch.cuda.synchronize()

        def call(rank, landed=landed, streams=streams, weight=weight, normed=normed):
            done = gemm_reduce_scatter.reduce_add_norm(
                landed[rank], streams[rank], weight, 1e-5, ranks.peers[rank], FIT // size
            )
            normed[rank] = done[0]

        ranks.warm(call)
        ranks.each(call)
        torch.cuda.synchronize()
        bound = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
        for rank in range(size):
            assert torch.equal(streams[rank], want[1]) and torch.equal(normed[rank], normed[0])
            torch.testing.assert_close(normed[rank].float(), want[0].float(), atol=bound, rtol=bound)


def test_a_thousand_replays_of_a_graph_with_changing_input():
    """Calls of all kinds in one graph; input, expected sum and comparison are made on the device, replay by replay."""
    size = 2
    ranks = Ranks(size)
    graphs, wrong = [], [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(size)]
    shapes = [(8,), (3, 4096), (1,), (ONE_SHOT // 2 + 16,), (70, 512), (71, 512), (130, 512), (132, 512), (64, 4096)]
    base = [[torch.randint(0, 8, shape, device="cuda").bfloat16() for shape in shapes] for _ in range(size)]
    weight = torch.ones(512, device="cuda", dtype=torch.bfloat16)
    turns = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(size)]

    def body(rank):
        turn = turns[rank].add_(1).remainder(16)
        for i in range(len(shapes)):
            x = base[rank][i] + turn.bfloat16()
            want = sum(base[r][i] + turn.bfloat16() for r in range(size))  # whole numbers below 256: exact
            if x.shape[-1] == 512:
                kind = KINDS[len(x) % 3]
                _, x = kind(x, torch.zeros_like(x), weight, 1e-5, ranks.peers[rank])
            elif len(x) == 64:
                allreduce.two_shot(x, ranks.peers[rank])
            else:
                allreduce.all_reduce(x, ranks.peers[rank])
            wrong[rank].add_((x != want).sum())

    ranks.warm(body)
    for rank in range(size):
        with torch.cuda.stream(ranks.streams[rank]):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            body(rank)
            graph.capture_end()
            graphs.append(graph)
    for count in wrong:
        count.zero_()
    torch.cuda.synchronize()
    for turn in range(1000):
        for rank in range(size) if turn % 2 else reversed(range(size)):
            with torch.cuda.stream(ranks.streams[rank]):
                graphs[rank].replay()
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0] * size
    assert all(int(turn) >= 1000 for turn in turns)
