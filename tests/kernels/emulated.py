"""A plugin of pytest: C++ kernels of another processor, under QEMU, in place of this one's.

All else, the callers and the tests with their references, runs as ever: ops.py's calls go to emulated.cpp, with the
memory of their tensors, and come back. What must not be here at once with a test's monkeypatching is replaced for good,
so this is for a process of its own (test_aarch64.py).
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import re
import shutil
import struct
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

from phalanx.kernels.cpp import compiler, ops
from phalanx.kernels.quantized import blocks_cpu
from torch import Tensor

COMPILER, EMULATOR, SYSROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
NM = "aarch64-linux-gnu-nm"
GIVEN = "PHALANX_TEST_EMULATED"  # the environment's variable: instruction set, QEMU's CPU, a folder for the report


def missing() -> str:
    """Why nothing can be emulated here, or ""."""
    absent = [name for name in (COMPILER, EMULATOR) if not shutil.which(name)]
    return f"{' and '.join(absent)}: not installed (Debian's g++-aarch64-linux-gnu and qemu-user)" if absent else ""


class Machine:
    """An emulated processor that runs kernels."""

    def __init__(self, cpu: str, folder: Path):
        self.exported: list[str] = []  # operations of the libraries that are loaded
        self.called: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        driver = folder / "emulated"
        source = Path(__file__).with_suffix(".cpp")
        subprocess.run([COMPILER, "-O1", str(source), "-o", str(driver), "-ldl", "-lpthread"], check=True, timeout=120)
        command = [EMULATOR, "-L", SYSROOT, "-cpu", cpu, str(driver)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._ops: dict[int, ops.Op] = {}  # by address
        self._memory: dict[bytes, list[tuple[int, int]]] = {}  # of the tensors among an operation's arguments

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)

    def ask(self, what: str, *values: int | bytes) -> int:
        with self._lock:
            self._put(ord(what))
            for value in values:
                self._put(len(value) if isinstance(value, bytes) else value)
                self._process.stdin.write(value if isinstance(value, bytes) else b"")
            self._process.stdin.flush()
            return self._number()

    def _put(self, *numbers: int) -> None:
        self._process.stdin.write(struct.pack(f"{len(numbers)}q", *numbers))

    def _number(self) -> int:
        got = self._process.stdout.read(8)
        assert len(got) == 8, f"ended: {self._process.wait(10)}"
        return struct.unpack("q", got)[0]

    def prepare_op(self, op: ops.Op, source: str, name: str) -> None:
        """In place of Op.__init__."""
        library = ops.libraries()[source]
        op.name, op.address = name, getattr(library, name)
        op.fields = library.number(f"{name}_fields")
        self._ops[op.address] = op

    def pack(self, values: tuple[ops.Value, ...]) -> bytes:
        packed = PACK(values)
        stores = [x.untyped_storage() for x in values if isinstance(x, Tensor)]
        self._memory[packed] = [(one.data_ptr(), one.nbytes()) for one in stores]
        return packed

    def run_calls(self, calls: ctypes.Array, count: int, threads: int, together: bool = False) -> None:
        """In place of ops.run_calls. together: each call by a thread of its own."""
        listed = []
        for call in calls[:count]:
            op = self._ops[call.run]
            self.called[op.name] += 1
            at = ctypes.c_void_p.from_buffer(call, type(call).args.offset).value
            listed.append((op.address, ctypes.string_at(at, 8 * op.fields)))
        regions = joined([one for _, args in listed for one in self._memory[args]])
        with self._lock:
            self._put(ord("R"), threads, together, len(regions))
            for begin, end in regions:
                self._put(begin, end - begin)
                self._process.stdin.write(ctypes.string_at(begin, end - begin))
            self._put(len(listed))
            for function, args in listed:
                self._put(function, len(args) // 8)
                self._process.stdin.write(args)
            self._process.stdin.flush()
            for begin, end in regions:
                if self._number():
                    ctypes.memmove(begin, self._process.stdout.read(end - begin), end - begin)


class Library:
    """In place of ctypes.CDLL."""

    machine: Machine

    def __init__(self, path: str):
        self._handle = self.machine.ask("L", path.encode())
        assert self._handle, f"{EMULATOR} cannot load {path}"
        listed = subprocess.check_output([NM, "-D", "--defined-only", path], text=True, timeout=60)
        self.machine.exported += re.findall(r" (\w+)_fields$", listed, re.M)

    def __getattr__(self, name: str) -> int:
        if address := self.machine.ask("S", self._handle, name.encode()):
            return address
        raise AttributeError(name)

    def number(self, name: str) -> int:
        return self.machine.ask("I", getattr(self, name))


PACK = ops.pack


def joined(regions: list[tuple[int, int]]) -> list[list[int]]:
    """Addresses and sizes as beginnings and ends, each byte once."""
    found: list[list[int]] = []
    for begin, size in sorted(regions):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], begin + size)
        elif size:
            found.append([begin, begin + size])
    return found


def install() -> None:
    isa, cpu, folder = os.environ[GIVEN].split(" ", 2)
    machine = Library.machine = Machine(cpu, Path(folder))
    compiler.ISAS, compiler.MACHINE = compiler.AARCH64, "aarch64"
    compiler.isas = lambda: [isa]
    compiler.compilers = lambda: iter([[COMPILER]])
    compiler.ctypes = SimpleNamespace(CDLL=Library)
    ops.Op.__init__ = lambda op, source, name: machine.prepare_op(op, source, name)
    ops.pack, ops.run_calls = machine.pack, machine.run_calls
    blocks_cpu._most_rows = lambda library, suffix: library.number(f"max_rows_{suffix}")


def pytest_sessionfinish() -> None:
    """Report how often each operation was called, of all that there are."""
    machine, folder = Library.machine, Path(os.environ[GIVEN].split(" ", 2)[2])
    machine.close()
    report = {name: machine.called[name] for name in sorted({*machine.exported, *machine.called})}
    (folder / "called.json").write_text(json.dumps(report))


if GIVEN in os.environ:  # before pytest reads a conftest.py, which asks for the instruction sets
    install()
