"""Tests that every communication backend must pass, run on each rank; as a script, on MPI's ranks."""

from __future__ import annotations

import sys
import time

import torch
from phalanx.comm import broadcast, mesh
from phalanx.kernels.cpp import ops


def collectives(comm) -> None:
    n, r = comm.size, comm.rank
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        x = torch.full((3, 2), r + 1).to(dtype)
        assert comm.all_reduce(x) is x
        assert x.tolist() == [[n * (n + 1) / 2] * 2] * 3, (dtype, x)
        gathered = comm.all_gather(torch.full((2,), r).to(dtype))
        assert gathered.dtype == dtype and gathered.tolist() == [[i, i] for i in range(n)]
        scattered = comm.reduce_scatter(torch.arange(n).to(dtype)[:, None].repeat(1, 2) + r)
        assert scattered.tolist() == [n * r + n * (n - 1) / 2] * 2, scattered
        counts = [(r + i) % 3 for i in range(n)]  # symmetric: what r sends to i is as long as what i sends to r
        x = torch.tensor([10 * r + i for i in range(n) for _ in range(counts[i])]).to(dtype)
        uneven = comm.all_to_allv(x, counts, torch.empty_like(x), counts)
        assert uneven.tolist() == [10 * i + r for i in range(n) for _ in range(counts[i])]
        y = torch.full((4,), r).to(dtype)
        assert comm.broadcast(y, n - 1) is y and y.tolist() == [n - 1] * 4
    comm.barrier()


def messages(comm) -> None:
    """Around the ring, in order."""
    n, r = comm.size, comm.rank
    if n == 1:
        return
    for i in range(5):
        x = torch.tensor([float(r), float(i)])
        if r % 2 == 0:
            comm.send(x, (r + 1) % n)
        got = comm.recv(torch.empty(2), (r - 1) % n)
        if r % 2:
            comm.send(x, (r + 1) % n)
        assert got.tolist() == [(r - 1) % n, i]
    large = [torch.full((100_000,), float(i)) for i in range(3)]  # beyond what any backend sends before it is taken
    for x in large:
        comm.isend(x, (r + 1) % n)
    for i in range(3):
        assert comm.recv(torch.empty(100_000), (r - 1) % n).unique().tolist() == [i]


def groups(comm) -> None:
    n, r = comm.size, comm.rank
    part = comm.split(r % 2, -r)  # reversed order
    members = sorted((q for q in range(n) if q % 2 == r % 2), reverse=True)
    assert (part.size, part.rank) == (len(members), members.index(r))
    assert part.all_gather(torch.tensor([r]))[:, 0].tolist() == members
    for tp, pp in ((tp, pp) for tp in range(1, n + 1) for pp in range(1, n + 1) if n % (tp * pp) == 0):
        grid = mesh.build(comm, tp, pp)
        size, place = tp * pp, r % (tp * pp)
        first = r - place
        assert grid.replica == r // size
        assert grid.tensor.all_gather(torch.tensor([r]))[:, 0].tolist() == [r // tp * tp + i for i in range(tp)]
        assert grid.last == (place < tp) and grid.first == (place >= size - tp)
        stages = grid.pipe.all_gather(torch.tensor([r]))[:, 0].tolist()
        assert stages == [first + place % tp + tp * (pp - 1 - i) for i in range(pp)]  # the last one is rank 0's
        assert r in mesh.replica_ranks(n, n // size)[grid.replica]
        lines = mesh.control_groups(comm, n // size)
        assert [*lines] == ([*range(n // size)] if r == 0 else [grid.replica])
        for i, line in lines.items():
            members = line.all_gather(torch.tensor([r]))[:, 0].tolist()
            assert members == ([0] if i else []) + list(range(i * size, (i + 1) * size))


def texts(comm) -> None:
    assert broadcast.broadcast_bytes(comm, b"hello" if comm.rank == 0 else b"ignored") == b"hello"
    assert broadcast.broadcast_bytes(comm, b"") == b""
    mine = b"x" * comm.rank
    assert broadcast.gather_bytes(comm, mine) == [b"x" * i for i in range(comm.size)]


LENGTHS = (0, 1, 3995, 3996, 3997, 4000, 100_000, 7)


def plans(comm, line) -> None:
    """Bytes of every length arrive in order, in bursts longer than the ring."""
    for repeat in range(3):
        for length in LENGTHS:
            want = bytes((i + repeat) % 251 for i in range(length))
            if comm.rank == 0:
                line.publish(want)
            else:
                got = line.receive()
                assert got == want, (length, len(got))
        if comm.rank == 0 and repeat == 1:
            time.sleep(0.2)  # longer than QUIET_AFTER: the followers must be woken
    for size in (1, 3_000_000):  # to one rank alone
        if comm.rank == 0:
            line.publish(b"next")
            line.send(bytes(size), comm.size - 1)
        else:
            assert line.receive() == b"next"
        if comm.rank == comm.size - 1:
            assert line.take(size) == bytes(size)
    while comm.rank == 0 and line.progress():
        time.sleep(1e-4)
    comm.barrier()


def all_of_it(comm, line) -> None:
    collectives(comm)
    messages(comm)
    groups(comm)
    texts(comm)
    plans(comm, line)


def over_shared_memory(world) -> None:
    """ShmComm takes some sizes and leaves others to MPI; all ranks get the same bits."""
    from phalanx.comm import shm
    from phalanx.comm.base import all_reduce_add_norm

    comm = shm.ShmComm(world)
    assert comm.shm is not None
    _, stream = all_reduce_add_norm(comm, torch.full((2, 8), comm.rank + 1.0), torch.ones(2, 8), torch.ones(8), 1e-5)
    assert (stream == 1 + comm.size * (comm.size + 1) / 2).all() and comm.shm.calls == 1  # with the norm
    for size in (1, 1000, shm.SLOT, shm.SLOT + 1):
        x = torch.randn(size, generator=torch.Generator().manual_seed(comm.rank))
        want = sum(world.all_gather(x))
        torch.testing.assert_close(comm.all_reduce(x), want)
        assert len(set(broadcast.gather_bytes(world, x.numpy().tobytes()))) == 1
    assert comm.shm.calls == 4
    collectives(comm)
    assert comm.shm.calls == 8  # its sums and gathers of f32, and its sums of shorter floats
    assert shm.share(world, 4096, able=world.rank > 0) is None


def main() -> None:
    from phalanx.comm import mpi, watchdog

    torch.set_num_threads(1)
    world = mpi.join(int(sys.argv[1]))
    if ops.available():
        over_shared_memory(world)
    guard = watchdog.Watchdog(world, ["here"] * world.size, timeout=20)
    all_of_it(world, broadcast.MpiPlanBroadcast(world, guard, range(world.size)))
    guard.stop()
    world.barrier()
    print(f"passed {world.rank} of {world.size}")
    mpi.leave()


if __name__ == "__main__":
    main()
