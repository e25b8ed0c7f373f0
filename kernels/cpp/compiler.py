"""C++ compiled where it runs, for what this processor can: a source of kernels/ becomes a library of functions.

The compiler is $CXX, c++, g++ or clang++, or the one in the package `ziglang`; where there is none that works, torch
computes. Libraries lie in the node's folder of compiled kernels (kernel_cache.py) under the hash of all that went into
them, with a checksum behind: a damaged one could end the process where it is loaded, so it is made again. Of several
ranks that want one at the same time, one compiles and the others wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from ... import child_python, linux_calls
from .. import kernel_cache

log = logging.getLogger("phalanx")

HERE = Path(__file__).resolve().parent
# Every .cpp of the families' folders by its name, and every header of this folder by its file name.
SOURCES = {path.stem: path for path in sorted(HERE.parent.glob("*/*.cpp"))}
HEADERS = {path.name: path for path in sorted(HERE.glob("*.h"))}

# From the best, by processors. What /proc/cpuinfo must list, and what the compiler gets as flags. `generic` is what
# every such processor has; on aarch64 that is NEON. Grace has SVE2, too, but no wider vectors by it. sve256 and sve512
# are for vectors of just so many bits.
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX512_FLAGS = ("-mavx2", "-mfma", *(f"-m{name}" for name in _AVX512))
_DOTPROD = ("atomics", "asimdrdm", "asimddp")
Isas = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
X86_64: Isas = {
    "amx": (
        (*_AVX512, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
        (*_AVX512_FLAGS, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    ),
    "avx512_bf16": (
        (*_AVX512, "avx512_vnni", "avx512_bf16"),
        (*_AVX512_FLAGS, "-mavx512vnni", "-mavx512bf16"),
    ),
    "avx512_vnni": ((*_AVX512, "avx512_vnni"), (*_AVX512_FLAGS, "-mavx512vnni")),
    "avx512": (_AVX512, _AVX512_FLAGS),
    "avx2": (("avx2", "fma", "f16c"), ("-mavx2", "-mfma", "-mf16c")),
    "generic": ((), ()),
}
AARCH64: Isas = {
    f"sve{bits}{name}": (("sve", f"sve{bits}", *needed), (f"-march=armv8.2-a+sve{flags}", f"-msve-vector-bits={bits}"))
    for bits in (512, 256)
    for name, needed, flags in (("_bf16", ("svei8mm", "svebf16"), "+i8mm+bf16"), ("", (), ""))
} | {
    "neon_bf16": ((*_DOTPROD, "i8mm", "bf16"), ("-march=armv8.2-a+dotprod+i8mm+bf16",)),
    "neon_dotprod": (_DOTPROD, ("-march=armv8.2-a+dotprod",)),
    "generic": ((), ()),
}
MACHINE = platform.machine()
ISAS = {"x86_64": X86_64, "aarch64": AARCH64, "arm64": AARCH64}.get(MACHINE, {"generic": ((), ())})
# contract: a * b + c as one instruction. Vectors are passed between inlined functions alone, so their ABI is no matter.
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-exceptions", "-fno-rtti", "-ffp-contract=fast",
         "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi")  # fmt: skip
CPUINFO = Path("/proc/cpuinfo")
COMPILE_SECONDS = 300
LOG_EVERY = 5.0  # seconds: the log counts up
ERROR_LINES = 8  # of a compiler's message that are shown
_ARCH_PRCTL = 158  # the system call's number on x86-64
_PR_SVE_GET_VL = 51  # of sys/prctl.h
_CHECKSUM = 32  # bytes behind the library


class CompileError(Exception):
    """No compiler here makes a library of the source; the message has each one's output."""


def isas() -> list[str]:
    """Instruction sets that this processor has, the best first."""
    present = _cpu_flags()
    found = [name for name, (needed, _) in ISAS.items() if set(needed) <= present]
    return [name for name in found if name != "amx" or _tiles_permitted()]


@functools.cache
def _tiles_permitted() -> bool:
    """Whether Linux lets this process use tile registers. It has to be asked, from 5.16 on; threads made later may use
    them too."""
    ask, tiles = 0x1023, 18  # ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA of asm/prctl.h
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, ask, tiles) == 0)


# macOS's names for features of /proc/cpuinfo.
_SYSCTLS = {"atomics": "LSE", "asimdrdm": "RDM", "asimddp": "DotProd", "i8mm": "I8MM", "bf16": "BF16"}


@functools.cache
def _cpu_flags() -> frozenset[str]:
    if sys.platform == "darwin":
        return frozenset(name for name, feature in _SYSCTLS.items() if _sysctl(f"hw.optional.arm.FEAT_{feature}"))
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.split()) | {f"sve{_sve_bits()}"}
    return frozenset()


def _sve_bits() -> int:
    """The length of this process's SVE vectors, of which processors may have several; 0 without SVE."""
    found = ctypes.CDLL(None).prctl(_PR_SVE_GET_VL, 0, 0, 0, 0)  # bytes, and flags above
    return 8 * (found & 0xFFFF) if found > 0 else 0


def _sysctl(name: str) -> int:
    """A number that macOS's kernel tells; 0 where it knows no such name."""
    value, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t())
    return value.value


def compilers() -> Iterator[list[str]]:
    """Commands that may compile C++, in the order in which they are tried."""
    if chosen := os.environ.get("CXX"):
        yield shlex.split(chosen)
    found = [shutil.which(name) for name in ("c++", "g++", "clang++")]
    yield from {os.path.realpath(path): [path] for path in found if path}.values()  # c++ is one of the others
    if importlib.util.find_spec("ziglang"):
        # Compiles C++ without its library, which Zig would compile as well, for a minute; no source needs it.
        yield child_python.command("-m", "ziglang", "cc", "-x", "c++")


def load(source: str, isa: str = "") -> ctypes.CDLL:
    """The library of `source`.cpp for an instruction set, the best one unless given. Raises CompileError."""
    return _load(source, isa or isas()[0])


def _file(source: str, isa: str) -> Path:
    """The path of a source's compiled library."""
    return kernel_cache.cache_folder() / _file_name(source, isa)


@functools.cache  # a start asks twice, and it takes a millisecond
def _file_name(source: str, isa: str) -> str:
    inputs = source_text(source), MACHINE, isa, FLAGS, ISAS[isa], platform.libc_ver()
    return f"{source}-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:32]}.so"


@functools.cache
def _load(source: str, isa: str) -> ctypes.CDLL:
    file = _file(source, isa)
    if not _whole(file):
        with kernel_cache.locked(file.with_suffix(".lock")):
            if not _whole(file):  # another rank may have been faster
                binary = compile_text(source_text(source), isa, source)
                kernel_cache.atomic_write(file, binary + hashlib.sha256(binary).digest())
    return ctypes.CDLL(str(file))


def load_all(names: list[str], isa: str) -> dict[str, ctypes.CDLL]:
    """The libraries of all these sources. What has to be compiled is, by one rank of the node, which shows it: it takes
    up to a minute. Raises the first error."""
    if not _all_kept(names, isa):
        with kernel_cache.locked(kernel_cache.cache_folder() / f"{isa}.lock"):
            if not _all_kept(names, isa):  # another rank may have been faster
                compile_text("", isa, "trial")  # raises where no compiler works, or none knows these instructions
                log.info("compiling C++ kernels for %s; the next start on this machine finds them", isa)
                return _load_together(names, isa)
    return _load_together(names, isa)


def _all_kept(names: list[str], isa: str) -> bool:
    return all(_file(name, isa).exists() for name in names)


def _load_together(names: list[str], isa: str) -> dict[str, ctypes.CDLL]:
    """Several are compiled at a time."""
    found: dict[str, ctypes.CDLL | Exception] = {}
    left = list(names)

    def work() -> None:
        while left:
            with contextlib.suppress(IndexError):
                name = left.pop()
                try:
                    found[name] = load(name, isa)
                except Exception as error:
                    found[name] = error
                    left.clear()  # the others would fail for the same reason

    threads = [threading.Thread(target=work) for _ in range(len(linux_calls.processors()))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(LOG_EVERY)
            if thread.is_alive():
                log.info("compiling C++ kernels: %d of %d", len(found), len(names))
    for one in found.values():
        if isinstance(one, Exception):
            raise one
    return {name: one for name, one in found.items() if isinstance(one, ctypes.CDLL)}


def compile_ahead() -> str:
    """Compile all that a start on this machine will load, and return for which instruction set; "": no compiler works.
    It needs no torch: `make install` does it while that is fetched."""
    for isa in isas():
        with contextlib.suppress(CompileError):
            load_all(sorted(SOURCES), isa)
            return isa
    return ""


def source_text(source: str) -> str:
    """The source and the headers that it includes as one text: the compiler needs no include path."""
    seen: set[str] = set()

    def expand(path: Path) -> Iterator[str]:
        yield f'#line 1 "{path.name}"'
        for number, line in enumerate(path.read_text().splitlines(), 1):
            named = re.fullmatch(r'#include "(.*)"', line)
            if named is None:
                yield line
            elif named[1] not in seen:
                seen.add(named[1])
                yield from expand(HEADERS[named[1]])
                yield f'#line {number + 1} "{path.name}"'

    return "\n".join([*expand(SOURCES[source]), ""])


def compile_text(text: str, isa: str, name: str) -> bytes:
    """The library, by the first compiler that makes one. Raises CompileError."""
    reasons = []
    for command in compilers():
        with tempfile.TemporaryDirectory(dir=kernel_cache.cache_folder()) as made:
            given, out = Path(made, f"{name}.cpp"), Path(made, f"{name}.so")
            given.write_text(text)
            flags = [*FLAGS, *ISAS[isa][1]]
            if "ziglang" in command:  # it knows processors, but no -march
                flags = [flag.replace("-march=armv8.2-a", "-mcpu=generic") for flag in flags]
            line = [*command, *flags, str(given), "-o", str(out), "-lpthread"]
            # Zig keeps its parts in the home directory, which may be another node's too, or not writable.
            kept = str(kernel_cache.cache_folder() / "zig")
            environ = os.environ | {"ZIG_GLOBAL_CACHE_DIR": kept, "ZIG_LOCAL_CACHE_DIR": made}
            try:
                done = subprocess.run(
                    line, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                    timeout=COMPILE_SECONDS,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                reasons.append(f"{shlex.join(command)}: {error}")
                continue
            if done.returncode == 0 and out.exists():
                return out.read_bytes()
            words = "\n".join(done.stderr.strip().splitlines()[:ERROR_LINES])
            reasons.append(f"{shlex.join(command)} (exit code {done.returncode}): {words}")
    if not reasons:
        raise CompileError("there is no C++ compiler: install g++ or clang++, or `pip install ziglang`")
    raise CompileError(f"{name}.cpp does not compile for {isa}:\n" + "\n".join(reasons))


def _whole(file: Path) -> bool:
    try:
        content = file.read_bytes()
    except OSError:
        return False
    binary = content[:-_CHECKSUM]
    return len(binary) > 0 and hashlib.sha256(binary).digest() == content[-_CHECKSUM:]


if __name__ == "__main__" and sys.argv[1:] == ["ahead"]:  # `make install` asks
    os.nice(10)
    compile_ahead()
elif __name__ == "__main__":  # `phalanx doctor` asks
    for one in isas():
        with contextlib.suppress(CompileError):
            compile_text("", one, "trial")
            print(one)
            break
