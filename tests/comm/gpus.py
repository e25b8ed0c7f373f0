"""Tests of a tensor group on several GPUs, run on each rank; a script for mpirun: `gpus.py RANKS`."""

from __future__ import annotations

import os
import random
import sys

import torch
from phalanx.comm import custom_allreduce, mpi, nccl, symmetric_memory
from phalanx.comm.base import all_reduce_add_norm
from phalanx.comm.dma_allreduce import MAX_BYTES
from phalanx.kernels.collective import allreduce, allreduce_norm
from phalanx.kernels.collective.allreduce import ONE_SHOT, SLOT
from phalanx.kernels.gemm import autotune, gemm_reduce_scatter
from phalanx.kernels.norm import norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (3, 33), (1, 4096), (64, 4096), (65, 1000), (16, 8192), (300, 512), (64, 8192), (300, 1000))


def plain(comm) -> None:
    """NCCL's collectives."""
    n, r = comm.size, comm.rank
    for dtype in (*DTYPES, torch.int64):
        x = torch.full((3, 2), r + 1, device="cuda").to(dtype)
        assert comm.all_reduce(x) is x and x.tolist() == [[n * (n + 1) / 2] * 2] * 3
        assert comm.all_gather(torch.full((2,), r, device="cuda").to(dtype)).tolist() == [[i, i] for i in range(n)]
        scattered = comm.reduce_scatter(torch.arange(n, device="cuda").to(dtype)[:, None].repeat(1, 2) + r)
        assert scattered.tolist() == [n * r + n * (n - 1) / 2] * 2
        y = torch.full((4,), r, device="cuda").to(dtype)
        assert comm.broadcast(y, n - 1) is y and y.tolist() == [n - 1] * 4
    comm.barrier()


def beside(comm) -> None:
    """Sums that begin ahead of other work: each is made once, in any order of waiting, whatever the size."""
    n, r = comm.size, comm.rank
    rng, order = random.Random(r), random.Random(0)
    for count in (33, SLOT // 2 + 8, MAX_BYTES // 2, MAX_BYTES // 2 + 8):
        a, b = (torch.full((count,), i + r, device="cuda", dtype=torch.bfloat16) for i in (1, 2))
        want = [n * i + n * (n - 1) // 2 for i in (1, 2)]
        for _ in range(20):
            x, y = a.clone(), b.clone()
            dawdle(rng)
            begun = {id(x): comm.all_reduce_async(x)}
            other = torch.randn(2048, 2048, device="cuda")
            other @ other
            begun[id(y)] = comm.all_reduce_async(y, lambda rest, y=y: y.add_(1 if rest is None else rest + 1))
            for wait_for_y in order.sample((False, True), 2):
                if wait_for_y:  # small ones do not begin
                    work = begun[id(y)]
                    assert (work.wait() if work else comm.all_reduce(y).add_(1)) is y
                    assert (y == want[1] + 1).all()
                else:
                    work = begun[id(x)]
                    assert (work.wait() if work else comm.all_reduce(x)) is x and (x == want[0]).all()
        assert (comm.all_reduce(a.clone()) == want[0]).all()
    comm.barrier()


def regions(host) -> None:
    """Each rank writes to all regions at equal distances; each owner finds what all have written, and zeros."""
    driver = symmetric_memory.Driver()
    base, stride = symmetric_memory.map_symmetric(host, driver, 1 << 20)
    own = base + host.rank * stride
    aside = own + (1 << 19)
    assert driver.read(own, 1 << 20) == bytes(1 << 20)
    host.barrier()
    driver.fill(aside, host.rank + 1, 64)
    for rank in range(host.size):
        driver.copy(base + rank * stride + 64 * host.rank, aside, 64)
    host.barrier()
    assert driver.read(own, 64 * host.size) == b"".join(bytes([r + 1] * 64) for r in range(host.size))
    host.barrier()


def refused(host) -> None:
    """A failure at the last moment is undone on all ranks: no memory is lost."""

    class Blind(symmetric_memory.Driver):
        def read(self, address: int, size: int) -> bytes:
            if host.rank == 1:
                raise RuntimeError("blind")
            return super().read(address, size)

    torch.cuda.synchronize()
    host.barrier()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        try:
            symmetric_memory.map_symmetric(host, Blind(), 1 << 30)
        except symmetric_memory.NoPeers as error:
            assert "group: blind" in str(error)
        else:
            raise AssertionError("mapped")
    host.barrier()
    assert torch.cuda.mem_get_info()[0] > free - (1 << 29)


def poison(comm) -> None:
    """NaN in all slots of this rank; nobody is in a call then."""
    torch.cuda.synchronize()
    comm.barrier()
    symmetric_memory.Driver().fill(int(comm.peers.table[comm.rank]), 0xFF, 2 * SLOT)
    comm.barrier()


def dawdle(rng: random.Random) -> None:
    """Up to about a tenth of a millisecond of the GPU's time, different on every rank."""
    if rng.random() < 0.5:
        torch.cuda._sleep(rng.randrange(200_000))  # ranks come at different times


def sums(comm) -> None:
    """Every size and kind, in an order that changes grids between calls; the bits are the reference's on all ranks."""
    rng = random.Random(comm.rank)
    for dtype in DTYPES:
        poison(comm)
        most = ONE_SHOT // dtype.itemsize
        counts = [1, 2, 3, 7, 8, 33, 4096, 4097, most - 1, most, most + 8 * comm.size, SLOT // dtype.itemsize]
        for count in counts + counts[::-1]:
            torch.manual_seed(count + comm.rank)
            x = torch.randn(count, device="cuda").to(dtype)
            want = allreduce.all_reduce_reference(list(comm.all_gather(x)))
            dawdle(rng)
            comm.all_reduce(x)
            assert torch.equal(x, want), (dtype, count)
        over = torch.ones(SLOT // dtype.itemsize + 1, device="cuda", dtype=dtype)
        assert (comm.all_reduce(over) == comm.size).all()  # over NCCL
        for rows, width in SHAPES:
            torch.manual_seed(rows + comm.rank)
            x = torch.randn(rows, width, device="cuda").to(dtype)
            parts = list(comm.all_gather(x))
            torch.manual_seed(1)  # the same on all ranks
            residual, weight = (torch.randn(*s, device="cuda").to(dtype) for s in ((rows, width), (width,)))
            want = allreduce_norm.all_reduce_add_norm_reference(parts, residual.clone(), weight, 1e-5)
            dawdle(rng)
            normed, stream = all_reduce_add_norm(comm, x, residual, weight, 1e-5)
            assert torch.equal(stream, want[1]), (dtype, rows, width)
            bound = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
            torch.testing.assert_close(normed.float(), want[0].float(), atol=bound, rtol=bound)
            everyone = comm.all_gather(normed)
            assert (everyone == everyone[0]).all()


def graphs(comm, host) -> None:
    """1000 replays of calls of all kinds, NCCL's among them, with input that changes on the device."""
    n = comm.size
    shapes = [(8,), (3, 4096), (1,), (ONE_SHOT // 2 + 8 * n,), (70, 512), (SLOT // 2 + 8,), (1040, 512)]
    base = [torch.randint(0, 8, shape, device="cuda").bfloat16() for shape in shapes]
    whole = [comm.all_gather(b).sum(0) for b in base]
    weight = torch.ones(512, device="cuda", dtype=torch.bfloat16)
    turn, wrong = torch.zeros(2, dtype=torch.int64, device="cuda")

    def body() -> None:
        now = turn.add_(1).remainder(16).bfloat16()
        for shape, mine, total in zip(shapes, base, whole, strict=True):
            x, want = mine + now, total + n * now  # whole numbers below 256: exact
            if shape[-1] == 512:
                _, x = all_reduce_add_norm(comm, x, torch.zeros_like(x), weight, 1e-5)
            else:
                comm.all_reduce(x)
            wrong.add_((x != want).sum())

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    rng = random.Random(comm.rank)
    with torch.cuda.stream(stream):
        body()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        body()
        graph.capture_end()
        for i in range(1000):
            if i % 10 == 0:
                dawdle(rng)
            graph.replay()
        stream.synchronize()
    assert int(turn) == 1001 and int(wrong) == 0, (int(turn), int(wrong))
    host.barrier()


def relative_error(got, want) -> float:
    return ((got.float() - want).norm() / want.norm()).item()


def sum_of(comm, x, linear):
    """The sum of all ranks' products and biases."""
    weight, bias = linear
    part = x.float() @ weight.float().T + (0 if bias is None else bias)
    return comm.all_gather(part.bfloat16()).float().sum(0)


def gemms(comm) -> None:
    """GEMMs whose outputs are scattered as they are computed: their sums, and in a graph, one after the other. Rank 0
    adds a bias to one of them."""
    if comm.size == 2:
        return
    gemm_reduce_scatter.SENT, counts, width, inputs = 0, [80, 128, 272], 256 * comm.size, 640
    torch.manual_seed(comm.rank)
    weights = [(torch.randn(width, inputs, device="cuda") / 25).bfloat16() for _ in range(2)]
    bias = None if comm.rank else torch.randn(width, device="cuda").bfloat16()
    linears = [(weights[0], bias), (weights[1], None)]
    said = autotune.tune(autotune.TuneRequest(one, counts, comm.peers, bias=by is not None) for one, by in linears)
    assert said.startswith("0 of 0 GEMMs"), said
    ones, rng = torch.ones(width, device="cuda", dtype=torch.bfloat16), random.Random(comm.rank)

    def fused(x, linear, residual):
        return comm.gemm_all_reduce_add_norm(x, linear[0], residual, ones, 1e-5, linear[1])

    x = torch.ones(128, inputs, device="cuda").bfloat16()
    assert fused(x, linears[0], torch.zeros(128, width, device="cuda").bfloat16()) is None, "not agreed yet"
    comm.agree()

    for rows in counts * 3:
        x = torch.randn(rows, inputs, device="cuda").bfloat16()
        for linear in linears:
            want = sum_of(comm, x, linear)
            torch.manual_seed(1)
            residual = torch.randn(rows, width, device="cuda").bfloat16()
            dawdle(rng)
            normed, stream = fused(x, linear, residual.clone())
            assert relative_error(stream, want + residual.float()) < 8e-3
            assert torch.equal(normed, norm.rms_norm(stream, ones, 1e-5))
            assert (comm.all_gather(stream) == stream).all()
    assert all(fused(x[:79], one, residual[:79]) is None and fused(x.half(), one, residual) is None for one in linears)
    stream, x = torch.cuda.Stream(), torch.randn(128, inputs, device="cuda").bfloat16()
    residual = torch.zeros(128, width, device="cuda", dtype=torch.bfloat16)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):

        def body():
            total = residual.clone()
            for linear in linears * 5:
                _, total = fused(x, linear, total)
            return total

        body()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        found = body()
        graph.capture_end()
        for i in range(300):
            if i % 10 == 0:
                x.normal_()
            dawdle(rng)
            graph.replay()
            if i % 10 == 9:
                want = sum(sum_of(comm, x, linear) for linear in linears) * 5
                assert relative_error(found, want) < 2e-2, i
    comm.barrier()


def main() -> None:
    host = mpi.join(int(sys.argv[1]))
    torch.cuda.set_device(host.rank)
    over_nccl = nccl.NcclComm(host)
    plain(over_nccl)
    beside(over_nccl)
    regions(host)
    refused(host)
    comm = custom_allreduce.CustomAllReduceComm(host)
    assert comm.peers is not None, comm.why
    sums(comm)
    beside(comm)
    graphs(comm, host)
    gemms(comm)
    gemm_reduce_scatter.SENT = allreduce.SENT
    again = custom_allreduce.CustomAllReduceComm(host)  # a second group of the same ranks
    sums(again)
    print(f"passed {host.rank} of {host.size}", flush=True)
    mpi.leave()
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)  # the others wait in a kernel or a collective: mpirun ends them
