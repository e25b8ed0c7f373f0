"""Which groups map each other's memory, with a driver of no GPU; sockets and descriptors are real."""

import ctypes
import itertools
import os
import re
import socket
from types import SimpleNamespace

import msgspec
import pytest
from phalanx.comm import symmetric_memory, threads
from phalanx.kernels import jit

STEP = 1 << 12  # what a GPU here maps at a time


class Memory:
    def __init__(self, size):
        self.bytes = bytearray(b"\xff" * size)


class Machine:
    """The GPUs of a host."""

    def __init__(self, **faults):
        self.memory: dict[int, Memory] = {}  # by the inode of the file that stands for it
        self.faults = faults


class Driver:
    """mapped.Driver as one process has it; breaking a rule of the real one's fails here."""

    def __init__(self, machine, device):
        self.machine, self.device = machine, device
        self.handles: dict[int, int] = {}  # their files
        self.reserved: dict[int, int] = {}  # sizes by address
        self.mappings: dict[int, Memory] = {}
        self.usable: set[int] = set()
        self.numbers = itertools.count(1)
        if machine.faults.get("fails", (None,))[0] == device:
            _, name, nth = machine.faults["fails"]
            setattr(self, name, failing(getattr(self, name), name, nth))

    def bus(self):
        return f"0000:{self.machine.faults.get('bus', {}).get(self.device, self.device):02X}:00.0"

    def find(self, bus):
        if self.machine.faults.get("alone"):
            raise RuntimeError("CUDA error 101 in cuDeviceGetByPCIBusId: invalid device ordinal")
        return int(bus[5:7], 16)

    def reaches(self, other):
        return (self.device, other) not in self.machine.faults.get("apart", [])

    def granularity(self):
        return STEP * self.machine.faults.get("coarse", {}).get(self.device, 1)

    def create(self, size):
        assert size > 0 and size % self.granularity() == 0
        file = os.memfd_create("memory")
        self.machine.memory[os.fstat(file).st_ino] = Memory(size)
        return self._handle(file)

    def _handle(self, file):
        handle = next(self.numbers) << 40
        self.handles[handle] = file
        return handle

    def release(self, handle):
        os.close(self.handles.pop(handle))

    def export(self, handle):
        return os.dup(self.handles[handle])

    def import_(self, descriptor):
        assert os.fstat(descriptor).st_ino in self.machine.memory
        return self._handle(os.dup(descriptor))

    def reserve(self, size):
        address = (self.device + 1 << 32) + (next(self.numbers) << 24)  # different on each rank
        self.reserved[address] = size
        return address

    def free(self, address, size):
        assert not self.mappings and self.reserved.pop(address) == size

    def map(self, address, size, handle):
        memory = self.machine.memory[os.fstat(self.handles[handle]).st_ino]
        assert len(memory.bytes) == size and address % STEP == 0
        assert any(start <= address and address + size <= start + room for start, room in self.reserved.items())
        assert all(a + len(m.bytes) <= address or address + size <= a for a, m in self.mappings.items())
        self.mappings[address] = memory

    def unmap(self, address, size):
        assert len(self.mappings.pop(address).bytes) == size
        self.usable.discard(address)

    def set_access(self, address, size):
        assert len(self.mappings[address].bytes) == size
        self.usable.add(address)

    def _at(self, address, size):
        base = max(a for a in self.usable if a <= address)
        assert address + size <= base + len(self.mappings[base].bytes)
        return self.mappings[base], slice(address - base, address - base + size)

    def fill(self, address, value, size):
        memory, place = self._at(address, size)
        memory.bytes[place] = bytes([value] * size)

    def copy(self, to, source, size):
        there, place = self._at(source, size)
        here, aside = self._at(to, size)
        garbled = self.machine.faults.get("garbles") and there is not here
        here.bytes[aside] = b"\xff" * size if garbled else there.bytes[place]

    def read(self, address, size):
        memory, place = self._at(address, size)
        return bytes(memory.bytes[place])


def failing(method, name, nth):
    calls = itertools.count(1)

    def call(*args):
        if next(calls) == nth:
            raise RuntimeError(f"CUDA error 801 in {name}: operation not supported")
        return method(*args)

    return call


def run(size: int, room: int = STEP + 1, **faults) -> tuple[list, list[Driver]]:
    """The result of each rank of a group of `size`: its Regions, or why not; and their drivers."""
    machine = Machine(**faults)
    drivers = [Driver(machine, device) for device in range(size)]

    def one(comm):
        try:
            return symmetric_memory.map_symmetric(comm, drivers[comm.rank], room)
        except symmetric_memory.NoPeers as error:
            return str(error)

    before = len(os.listdir("/proc/self/fd"))
    found = threads.run(one, size)
    assert len(os.listdir("/proc/self/fd")) == before and not any(d.handles for d in drivers)
    return found, drivers


def refusal(size: int, **faults) -> str:
    """Why the group maps nothing; the same on all ranks, which keep nothing."""
    found, drivers = run(size, **faults)
    assert found == [found[0]] * size and isinstance(found[0], str)
    assert not any(d.mappings or d.reserved or d.usable for d in drivers)
    return found[0]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("faults, steps", [({}, 2), ({"alone": True}, 2), ({"coarse": {1: 4}}, 4)])
def test_all_ranks_map_all_regions_which_are_zero(size, faults, steps):
    found, drivers = run(size, **faults)
    assert [r.stride for r in found] == [steps * STEP] * size and len({r.base for r in found}) == size
    for (base, stride), driver in zip(found, drivers, strict=True):
        assert driver.reserved == {base: size * stride}
        assert driver.usable == set(driver.mappings) == {base + r * stride for r in range(size)}
    for rank in range(size):  # all see the same memory at rank's place, which nothing else has
        (one,) = {d.mappings[base + rank * stride] for (base, stride), d in zip(found, drivers, strict=True)}
        assert not any(one.bytes)
        one.bytes[0] = 1


@pytest.mark.parametrize(
    "faults, why",
    [
        ({"apart": [(2, 1)]}, "rank 2 of the group: GPU 0000:02:00.0 cannot access GPU 0000:01:00.0"),
        ({"bus": {2: 1}}, "two ranks of the group have the GPU 0000:01:00.0"),
        ({"garbles": True}, "rank 0 of the group: what rank 1 wrote to its GPU does not arrive"),
    ],
)
def test_one_refusal_is_everybodys_and_nothing_is_kept(faults, why):
    assert refusal(3, **faults) == why


CALLS = {"bus": 1, "granularity": 1, "create": 1, "export": 1, "import_": 2, "reserve": 1, "map": 3, "set_access": 3}
CALLS |= {"fill": 2, "copy": 3, "read": 3}


@pytest.mark.parametrize("name, nth", [(name, nth) for name, count in CALLS.items() for nth in range(1, count + 1)])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_call_of_the_driver_that_fails(name, nth, rank):
    why = f"rank {rank} of the group: CUDA error 801 in {name}: operation not supported"
    assert refusal(3, fails=(rank, name, nth)) == why


def test_more_ranks_than_the_kernels_take():
    assert re.search("9 ranks.*8", refusal(9))


def offers(monkeypatch, change):
    """Let change(host, offers) act on what all ranks have offered."""
    real = symmetric_memory.gather_bytes

    def gather(host, data):
        found = real(host, data)
        if b"kernel" not in data:
            return found
        decoded = [msgspec.msgpack.decode(o, type=symmetric_memory._Offer) for o in found]
        change(host, decoded)
        host.barrier()
        return [msgspec.msgpack.encode(o) for o in decoded]

    monkeypatch.setattr(symmetric_memory, "gather_bytes", gather)


def test_ranks_of_several_hosts(monkeypatch):
    offers(monkeypatch, lambda host, all_: setattr(all_[1], "kernel", "another"))
    assert re.search("rank 1.*another host", refusal(2))


def test_ranks_that_do_not_see_each_others_sockets(monkeypatch):
    offers(monkeypatch, lambda host, all_: setattr(all_[1], "name", "in another namespace"))
    assert re.search("rank 0.*rank 1.*namespace", refusal(3))


def refuse(*_):
    raise OSError(24, "Too many open files")


def test_a_rank_that_gets_no_socket(monkeypatch):
    monkeypatch.setattr(symmetric_memory.socket, "socket", refuse)
    assert re.search("rank 0.*Errno 24", refusal(2))


def test_messages_of_strangers_are_left_out(monkeypatch):
    ends: list[int] = []

    def disturb(host, all_):
        mine = all_[host.rank]
        last = bytes([1 - host.rank])
        messages = [b"", b"x", b"?" * 16 + last, mine.token, mine.token + b"\7", mine.token + bytes([host.rank])]
        read, write = os.pipe()
        ends.append(read)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.connect("\0" + mine.name)
            for message in messages:
                socket.send_fds(stranger, [message], [write, write])
            stranger.send(mine.token + last)  # without a descriptor
        os.close(write)

    offers(monkeypatch, disturb)
    before = len(os.listdir("/proc/self/fd"))
    machine = Machine()
    found = threads.run(lambda comm: symmetric_memory.map_symmetric(comm, Driver(machine, comm.rank), 1), 2)
    assert [r.stride for r in found] == [STEP] * 2
    assert [os.read(end, 1) for end in ends] == [b"", b""]  # nobody has the writing end any more
    for end in ends:
        os.close(end)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_message_that_does_not_come(monkeypatch):
    real = symmetric_memory._FdExchange.send

    def send(self, descriptor, rank, to, offer):
        if (rank, to) != (2, 1):
            real(self, descriptor, rank, to, offer)

    monkeypatch.setattr(symmetric_memory._FdExchange, "send", send)
    monkeypatch.setattr(symmetric_memory, "WAIT", 0.05)
    assert re.search("rank 1.*nothing.*rank 2", refusal(3))


def test_a_mailbox_that_a_stranger_has_filled(monkeypatch):
    def fill(host, all_):
        if host.rank == 0:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
                stranger.setblocking(False)
                with pytest.raises(BlockingIOError):
                    while True:
                        stranger.sendto(b"x", "\0" + all_[0].name)

    offers(monkeypatch, fill)
    monkeypatch.setattr(symmetric_memory, "WAIT", 0.05)
    assert re.search("rank 1.*rank 0.*full", refusal(2))


def test_structures_are_as_long_as_the_drivers():
    assert ctypes.sizeof(symmetric_memory._Properties) == 32 and symmetric_memory._Properties.metadata.offset == 16
    assert ctypes.sizeof(symmetric_memory._Access) == 12 and symmetric_memory._Access.flags.offset == 8


def test_an_error_of_the_driver_names_the_call(monkeypatch):
    def text(status, found):
        found._obj.value = b"invalid device context"

    monkeypatch.setattr(jit, "libcuda", lambda: SimpleNamespace(cuGetErrorString=text, cuCtxGetDevice=lambda _: 201))
    with pytest.raises(RuntimeError, match="error 201.*cuCtxGetDevice"):
        symmetric_memory.Driver()


def test_a_driver_that_lacks_a_function(monkeypatch):
    monkeypatch.setattr(symmetric_memory.jit, "libcuda", SimpleNamespace)
    with pytest.raises(RuntimeError, match="driver.*cuStreamWaitValue32_v2"):
        symmetric_memory.call("cuStreamWaitValue32_v2")
