"""Symmetric memory: a region of each GPU of one host, mapped by all ranks of a group in one range of addresses.

Each rank allocates a region of its GPU's memory and sends it to the others as a file descriptor over unix sockets. The
driver's virtual memory management maps the regions at equal distances, so one strided tensor spans all of them.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import secrets
import socket
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..kernels import jit
from ..kernels.collective import allreduce
from .base import Comm
from .broadcast import collective_try, gather_bytes

MARK = 16  # bytes that each rank writes to its region, and the others compare, to test the mapping
WAIT = 30.0  # seconds for a message between ranks of one host


class NoPeers(RuntimeError):
    """The group's GPUs cannot use each other's memory; the text has the reason. Raised on all ranks alike."""


class Mapping(NamedTuple):
    """Rank r's region begins at base + r * stride, in bytes. The stride is the same on all ranks, the base is not."""

    base: int
    stride: int


def map_symmetric(host: Comm, driver: Driver, size: int) -> Mapping:
    """Allocate at least `size` zeroed bytes on each rank's GPU and map all regions. Collective over host.

    The regions live as long as the process. Raises NoPeers where that is not possible, and frees everything.
    """
    part = _Part(driver, host.rank)
    with part.passing, part.mapped:
        mine = msgspec.msgpack.encode(part.offer(size))
        offers = [msgspec.msgpack.decode(o, type=_Offer) for o in gather_bytes(host, mine)]
        if why := _refusal(offers):
            raise NoPeers(why)
        for step in (part.export, part.map, part.compare, part.clear):  # each on all ranks before the next
            if why := collective_try(host, partial(step, offers)):
                raise NoPeers(why)
        part.mapped.pop_all()
    return part.regions


class _Offer(msgspec.Struct):
    kernel: str = ""  # the host's boot id
    bus: str = ""  # its GPU's PCI address
    size: int = 0  # bytes of its region
    name: str = ""  # of its unix socket
    token: bytes = b""
    why: str = ""


def _refusal(offers: list[_Offer]) -> str:
    """Why the group cannot share memory, by the offers; "" if it may. The same on all ranks."""
    if len(offers) > allreduce.MAX_RANKS:
        return f"{len(offers)} ranks are more than {allreduce.MAX_RANKS}"
    for rank, offer in enumerate(offers):
        if offer.kernel != offers[0].kernel:
            return f"rank {rank} of the group is on another host"
        if offer.why:
            return f"rank {rank} of the group: {offer.why}"
        if offer.bus in [other.bus for other in offers[:rank]]:
            return f"two ranks of the group have the GPU {offer.bus}"
    return ""


class _Part:
    """One rank's steps of map_symmetric.

    `passing` frees what only the steps need. `mapped` frees the regions, unless all steps succeed.
    """

    def __init__(self, driver: Driver, rank: int):
        self.driver = driver
        self.rank = rank
        self.passing = contextlib.ExitStack()
        self.mapped = contextlib.ExitStack()
        self.regions = Mapping(0, 0)
        self._handle = 0

    def offer(self, size: int) -> _Offer:
        """Handles this rank shares with its peers."""
        offer = _Offer()
        try:
            offer.kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            offer.bus = self.driver.bus()
            step = self.driver.granularity()
            offer.size = -(-size // step) * step
            self._mailbox = self.passing.enter_context(contextlib.closing(_FdExchange()))
            offer.name, offer.token = self._mailbox.name, self._mailbox.token
        except (RuntimeError, OSError) as error:
            offer.why = str(error)
        return offer

    def export(self, offers: list[_Offer]) -> None:
        """Allocate this rank's region and send its descriptor to the others."""
        others = [r for r in range(len(offers)) if r != self.rank]
        for other in others:
            self._reach(offers[other].bus)
        self._handle = self.driver.create(offers[self.rank].size)
        self.passing.callback(self.driver.release, self._handle)  # mappings keep the memory alive
        descriptor = self.driver.export(self._handle)
        try:
            for other in others:
                self._mailbox.send(descriptor, self.rank, other, offers[other])
        finally:
            os.close(descriptor)

    def _reach(self, bus: str) -> None:
        try:
            there = self.driver.find(bus)
        except RuntimeError:
            return  # not visible to this process; the driver may map it all the same, or report an error
        if not self.driver.reaches(there):
            raise NoPeers(f"GPU {self.driver.bus()} cannot access GPU {bus}")

    def map(self, offers: list[_Offer]) -> None:
        """Map all ranks' regions and write this rank's mark to its own."""
        driver = self.driver
        descriptors = self._mailbox.receive({r for r in range(len(offers)) if r != self.rank})
        stride = max(o.size for o in offers)  # GPUs may differ in granularity
        whole = stride * len(offers)
        base = driver.reserve(whole)
        self.mapped.callback(driver.free, base, whole)
        self.regions = Mapping(base, stride)
        for rank, offer in enumerate(offers):
            handle = self._handle
            if rank != self.rank:
                handle = driver.import_(descriptors[rank])
                self.passing.callback(driver.release, handle)
            address = base + rank * stride
            driver.map(address, offer.size, handle)
            self.mapped.callback(driver.unmap, address, offer.size)
            driver.set_access(address, offer.size)
        driver.fill(base + self.rank * stride, self.rank + 1, MARK)

    def compare(self, offers: list[_Offer]) -> None:
        """Copy the others' marks from GPU to GPU and compare them: on some virtual machines other bytes arrive."""
        base, stride = self.regions
        aside = base + self.rank * stride + MARK
        for rank in range(len(offers)):
            self.driver.copy(aside, base + rank * stride, MARK)
            if self.driver.read(aside, MARK) != bytes([rank + 1] * MARK):
                raise NoPeers(f"what rank {rank} wrote to its GPU does not arrive")

    def clear(self, offers: list[_Offer]) -> None:
        """Zero this rank's region."""
        base, stride = self.regions
        self.driver.fill(base + self.rank * stride, 0, offers[self.rank].size)


class _FdExchange:
    """A unix socket to which each other rank sends a file descriptor.

    Every process on the host can see its name, so messages without its token are dropped.
    """

    def __init__(self) -> None:
        self.name = f"phalanx-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(16)
        self._descriptors: dict[int, int] = {}  # by rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(WAIT)
        self._socket.bind(f"\0{self.name}")

    def send(self, descriptor: int, rank: int, to: int, offer: _Offer) -> None:
        """Send a descriptor to rank `to`; returns once it is queued there.

        It uses sendmsg because socket.send_fds ignores its address argument.
        """
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        try:
            self._socket.sendmsg([offer.token, bytes([rank])], [rights], 0, f"\0{offer.name}")
        except TimeoutError:
            raise NoPeers(f"the unix socket of rank {to} is full and stays so for {WAIT:g} s") from None
        except OSError as error:
            raise NoPeers(
                f"rank {to} cannot be reached over a unix socket ({error.strerror}); the ranks of a host need the same "
                "network namespace"
            ) from None

    def receive(self, ranks: set[int]) -> dict[int, int]:
        """Wait for the descriptors of `ranks`; `close` closes them."""
        while missing := ranks - self._descriptors.keys():
            try:
                message, more, _, _ = self._socket.recvmsg(64, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)
            except TimeoutError:
                raise NoPeers(f"nothing came from rank {min(missing)} over a unix socket within {WAIT:g} s") from None
            rights = [data for level, kind, data in more if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
            sent = array.array("i", b"".join(rights))
            if len(sent) == 1 and message[:-1] == self.token and message[-1] in missing:
                self._descriptors[message[-1]] = sent[0]
            else:
                for descriptor in sent:
                    os.close(descriptor)
        return self._descriptors

    def close(self) -> None:
        self._socket.close()
        for descriptor in self._descriptors.values():
            os.close(descriptor)


# -- the driver

_PINNED, _ON_DEVICE, _DESCRIPTOR = 1, 1, 1  # CU_MEM_ALLOCATION_TYPE_, CU_MEM_LOCATION_TYPE_, CU_MEM_HANDLE_TYPE_...
_READ_WRITE, _RECOMMENDED = 3, 1  # CU_MEM_ACCESS_FLAGS_PROT_..., CU_MEM_ALLOC_GRANULARITY_...


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class Driver:
    """The CUDA driver's calls for memory that processes share, on the device of the current context.

    Addresses and handles are ints. Sizes are bytes; those of allocations and mappings are multiples of `granularity`.
    All calls raise RuntimeError with the driver's error text.
    """

    def __init__(self) -> None:
        device = ctypes.c_int()
        call("cuCtxGetDevice", ctypes.byref(device))
        self.device = device.value
        self._location = _Location(_ON_DEVICE, self.device)
        self._properties = _Properties(_PINNED, _DESCRIPTOR, self._location)

    def bus(self) -> str:
        """The device's PCI address, as 0000:1b:00.0."""
        text = ctypes.create_string_buffer(32)
        call("cuDeviceGetPCIBusId", text, len(text), self.device)
        return text.value.decode()

    def find(self, bus: str) -> int:
        """The device with this PCI address, if it is visible to the process."""
        device = ctypes.c_int()
        call("cuDeviceGetByPCIBusId", ctypes.byref(device), bus.encode())
        return device.value

    def reaches(self, other: int) -> bool:
        """Whether this device can access the other's memory."""
        can = ctypes.c_int()
        call("cuDeviceCanAccessPeer", ctypes.byref(can), self.device, other)
        return bool(can.value)

    def granularity(self) -> int:
        found = _u64()
        call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(self._properties), _RECOMMENDED)
        return found.value

    def create(self, size: int) -> int:
        """Allocate memory and return its handle. It lives as long as a handle, descriptor or mapping of it does."""
        handle = _u64()
        call("cuMemCreate", ctypes.byref(handle), _u64(size), ctypes.byref(self._properties), _u64(0))
        return handle.value

    def release(self, handle: int) -> None:
        call("cuMemRelease", _u64(handle))

    def export(self, handle: int) -> int:
        """A file descriptor by which another process can import the memory; the caller closes it."""
        descriptor = ctypes.c_int(-1)
        call("cuMemExportToShareableHandle", ctypes.byref(descriptor), _u64(handle), _DESCRIPTOR, _u64(0))
        return descriptor.value

    def import_(self, descriptor: int) -> int:
        """A handle of memory that another process has exported."""
        handle = _u64()
        call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), _DESCRIPTOR)
        return handle.value

    def reserve(self, size: int) -> int:
        """Reserve a range of addresses, in which nothing is mapped yet."""
        address = _u64()
        call("cuMemAddressReserve", ctypes.byref(address), _u64(size), _u64(0), _u64(0), _u64(0))
        return address.value

    def free(self, address: int, size: int) -> None:
        """Free a reserved range in which nothing is mapped any more."""
        call("cuMemAddressFree", _u64(address), _u64(size))

    def map(self, address: int, size: int, handle: int) -> None:
        """Map all of the handle's memory at an address within a reserved range."""
        call("cuMemMap", _u64(address), _u64(size), _u64(0), _u64(handle), _u64(0))

    def unmap(self, address: int, size: int) -> None:
        call("cuMemUnmap", _u64(address), _u64(size))

    def set_access(self, address: int, size: int) -> None:
        """Let this device read and write the memory that is mapped there."""
        access = _Access(self._location, _READ_WRITE)
        call("cuMemSetAccess", _u64(address), _u64(size), ctypes.byref(access), _u64(1))

    def fill(self, address: int, value: int, size: int) -> None:
        """Set bytes and wait for the end."""
        call("cuMemsetD8_v2", _u64(address), ctypes.c_ubyte(value), _u64(size))
        call("cuCtxSynchronize")

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy within or between GPUs and wait for the end: unmapping does not wait for running copies."""
        call("cuMemcpyDtoD_v2", _u64(to), _u64(source), _u64(size))
        call("cuCtxSynchronize")

    def read(self, address: int, size: int) -> bytes:
        found = ctypes.create_string_buffer(size)
        call("cuMemcpyDtoH_v2", found, _u64(address), _u64(size))
        return found.raw


_u64 = ctypes.c_uint64  # what CUdeviceptr, handles, size_t and flags are


def call(name: str, *args: Any) -> None:
    """Call a function of the CUDA driver. Raises RuntimeError on errors, and where the driver lacks the function."""
    function = getattr(jit.libcuda(), name, None)
    if function is None:
        raise RuntimeError(f"the CUDA driver has no {name}")
    jit.check(function(*args), name)
