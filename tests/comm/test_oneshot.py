"""Which groups map each other's memory, with a runtime of no GPU; and the sum with the norm, whatever carries it."""

import ctypes
import logging
import threading

import msgspec
import pytest
import torch
from phalanx.comm import nccl, oneshot, threads
from phalanx.comm.watch import LocalWatch
from phalanx.kernels import allreduce
from phalanx.kernels.norm import add_rms_norm_reference
from phalanx.rank.__main__ import Rank
from phalanx.rank.options import Job, Options

SIZE = 1 << 12


class Machine:
    """The GPUs of a host: memory by address, which a process has by allocating or by opening a handle."""

    def __init__(self, **faults):
        self.lock = threading.Lock()
        self.memory: dict[int, bytearray] = {}
        self.opened: list[tuple[int, int]] = []  # device, address
        self.closed: list[tuple[int, int]] = []
        self.faults = faults


class Runtime:
    """cupy.cuda.runtime as one process sees it."""

    def __init__(self, machine: Machine, device: int):
        self.machine, self.device = machine, device
        self.mapped: dict[int, int] = {}

    def getDevice(self):
        return self.device

    def deviceGetPCIBusId(self, device):
        return f"0000:{self.machine.faults.get('bus', {}).get(device, device):02X}:00.0"

    def deviceGetByPCIBusId(self, bus):
        if self.machine.faults.get("alone"):
            raise RuntimeError("cudaErrorInvalidDevice")
        return int(bus[5:7], 16)

    def deviceCanAccessPeer(self, here, there):
        return int((here, there) not in self.machine.faults.get("apart", []))

    def malloc(self, size):
        if self.machine.faults.get("full") == self.device:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        with self.machine.lock:
            address = (len(self.machine.memory) + 1) << 20
            self.machine.memory[address] = bytearray(b"\xff" * size)
        return address

    def free(self, address):
        assert address not in [a for d, a in self.machine.opened if (d, a) not in self.machine.closed]
        del self.machine.memory[address]

    def _at(self, address):
        base = self.mapped.get(address >> 20 << 20, address >> 20 << 20)
        return self.machine.memory[base], address % (1 << 20)

    def memset(self, address, value, size):
        memory, at = self._at(address)
        memory[at : at + size] = bytes([value] * size)

    def memcpy(self, to, source, size, kind):
        memory, at = self._at(source)
        data = bytes(memory[at : at + size])
        if self.machine.faults.get("garbles") and source >> 20 << 20 in self.mapped:
            data = b"\xff" * size
        if kind == 2:
            torch.frombuffer((ctypes.c_ubyte * size).from_address(to), dtype=torch.uint8)[:] = torch.tensor(
                list(data), dtype=torch.uint8
            )
        else:
            assert kind == 3
            memory, at = self._at(to)
            memory[at : at + size] = data

    def deviceSynchronize(self): ...

    def ipcGetMemHandle(self, address):
        return b"\0handle" + address.to_bytes(8, "little")

    def ipcOpenMemHandle(self, handle):
        if self.machine.faults.get("closed") == self.device:
            raise RuntimeError("cudaErrorMapBufferObjectFailed: mapping of buffer object failed")
        address = int.from_bytes(handle[7:], "little")
        self.machine.opened.append((self.device, address))
        here = address + (1 << 40)  # mapped elsewhere than where its owner has it
        self.mapped[here] = address
        return here

    def ipcCloseMemHandle(self, address):
        self.machine.closed.append((self.device, self.mapped.pop(address)))


def mapped(size: int, **faults) -> tuple[Machine, list]:
    """What each rank got: its addresses, or why not."""
    machine = Machine(**faults)

    def one(comm):
        runtime = Runtime(machine, comm.rank)
        try:
            found = oneshot.map_regions(comm, runtime, SIZE)
        except oneshot.NoPeers as error:
            return str(error)
        return [runtime.mapped.get(a, a) for a in found]

    return machine, threads.run(one, size)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("faults", [{}, {"alone": True}])
def test_all_ranks_map_all_regions_which_are_zero(size, faults):
    machine, found = mapped(size, **faults)
    assert found == [found[0]] * size and len(set(found[0])) == size
    assert all(machine.memory[a] == bytes(SIZE) for a in found[0]) and len(machine.memory) == size
    assert len(machine.opened) == size * (size - 1) and not machine.closed


@pytest.mark.parametrize(
    "faults, why",
    [
        ({"apart": [(2, 1)]}, "rank 2 of the group: GPU 0000:02:00.0 cannot access GPU 0000:01:00.0"),
        ({"full": 1}, "rank 1 of the group: cudaErrorMemoryAllocation: out of memory"),
        ({"closed": 0}, "rank 0 of the group: cudaErrorMapBufferObjectFailed: mapping of buffer object failed"),
        ({"bus": {2: 1}}, "two ranks of the group have the GPU 0000:01:00.0"),
        ({"garbles": True}, "rank 0 of the group: what rank 1 wrote to its GPU does not arrive"),
    ],
)
def test_one_refusal_is_everybodys_and_nothing_is_kept(faults, why):
    machine, found = mapped(3, **faults)
    assert found == [why] * 3
    assert not machine.memory and sorted(machine.opened) == sorted(machine.closed)


def test_more_ranks_than_the_kernels_take():
    machine, found = mapped(9)
    assert found == ["9 ranks are more than 8"] * 9 and not machine.memory


def test_ranks_of_several_hosts(monkeypatch):
    real = oneshot.gather_bytes

    def gather(host, data):
        found = real(host, data)
        if b"handle" in data:
            other = msgspec.msgpack.decode(found[1], type=oneshot._Offer)
            other.kernel = "another"
            found[1] = msgspec.msgpack.encode(other)
        return found

    monkeypatch.setattr(oneshot, "gather_bytes", gather)
    machine, found = mapped(2)
    assert found == ["rank 1 of the group is on another host"] * 2 and not machine.memory


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_with_the_norm(size, dtype):
    torch.manual_seed(0)
    parts, residual, weight = (
        torch.randn(size, 5, 33).to(dtype),
        torch.randn(5, 33).to(dtype),
        torch.randn(33).to(dtype),
    )
    want = allreduce.all_reduce_add_norm_reference(list(parts), residual.clone(), weight, 1e-5)
    total = allreduce.all_reduce_reference(list(parts))
    assert torch.equal(want[1], residual + total)
    assert torch.equal(want[0], add_rms_norm_reference(total, residual.clone(), weight, 1e-5)[0])

    def one(comm):
        return oneshot.all_reduce_add_norm(comm, parts[comm.rank].clone(), residual.clone(), weight, 1e-5)

    for normed, stream in threads.run(one, size):
        bound = 1e-6 if dtype == torch.float32 else 4e-2
        torch.testing.assert_close(stream, want[1], atol=bound, rtol=bound)
        torch.testing.assert_close(normed, want[0], atol=bound, rtol=bound)


def test_what_the_kernels_take():
    x = torch.empty(256, 8192, dtype=torch.bfloat16)  # 4 MiB
    assert allreduce.suits(x, 4) and allreduce.suits(x, 8) and not allreduce.suits(x, 9)
    assert not allreduce.suits(torch.empty(513, 8192, dtype=torch.bfloat16), 2)
    assert not allreduce.suits(x[:1].long(), 2)


@pytest.mark.parametrize("why", ["", "rank 1 of the group is on another host"])
def test_the_log_says_why_nccl_does_it_all(monkeypatch, caplog, why):
    class Group:
        def __init__(self, host):
            self.rank, self.size, self.why = host.rank, host.size, why

    monkeypatch.setattr(nccl, "NcclComm", lambda host: host)
    monkeypatch.setattr(oneshot, "OneShotComm", Group)

    def one(comm):
        rank = Rank(Job(options=Options(tp=2)), comm, ["here"] * 2, LocalWatch(comm.rank))
        assert rank._mesh(torch.device("cuda"))[1].tensor.size == 2

    with caplog.at_level(logging.INFO, "phalanx"):
        threads.run(one, 2)
    assert caplog.messages == ([f"all-reduces go over NCCL alone: {why}"] if why else [])


def test_more_than_two_ranks_share_large_sums(monkeypatch):
    for name in ("one_shot", "two_shot", "sent"):
        monkeypatch.setattr(allreduce, f"{name}_add_norm", lambda *_, name=name: name)

    def chosen(rows, size, width=8192):
        x = torch.empty(rows, width, dtype=torch.bfloat16)
        return allreduce.all_reduce_add_norm(x, x, x[0], 1e-5, allreduce.Peers(0, torch.zeros(size)))

    assert [chosen(9, 2), chosen(512, 2), chosen(8, 3)] == ["one_shot"] * 3
    assert [chosen(9, 3), chosen(128, 4), chosen(128, 8)] == ["sent"] * 3
    assert [chosen(129, 4), chosen(512, 8)] == ["two_shot"] * 2
    assert chosen(100_000, 4, 8) == "two_shot"  # too short for a mailbox
