"""Finds which GPUs CUDA shows to this process, and their PCI addresses, without CUDA.

It reads CUDA_VISIBLE_DEVICES and the driver's files. CUDA's rules for the variable (CUDA C++ Programming Guide,
environment variables): it lists indices, UUIDs of GPUs, or MIG devices. A unique prefix of a UUID is enough. A process
sees only the first MIG device. An entry of another kind, such as -1, ends the list; a duplicate empties it. CUDA
numbers the remaining entries from 0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ...rank import nvml

PROC = Path("/proc")
DEV = Path("/dev")
VARIABLE = "CUDA_VISIBLE_DEVICES"


class Gpu(NamedTuple):
    address: str  # PCI, as in sysfs: 0000:1b:00.0
    uuid: str  # "" if unknown
    model: str


def listed(environ: Mapping[str, str]) -> list[str] | None:
    """The valid entries of CUDA_VISIBLE_DEVICES, in CUDA's order; None where it is not set: all GPUs are visible."""
    if VARIABLE not in environ:
        return None
    entries: list[str] = []
    for entry in (one.strip() for one in environ[VARIABLE].split(",")):
        if not _kind(entry) or (entries and _kind(entry) != _kind(entries[0])):
            break
        if entry in entries:
            return []
        entries.append(entry)
    return entries[:1] if entries and _kind(entries[0]) == "MIG-" else entries


def _kind(entry: str) -> str:
    found = re.match(r"GPU-|MIG-|\d+$", entry)
    return "" if found is None else "number" if found[0].isdigit() else found[0]


def count(environ: Mapping[str, str]) -> int:
    """How many GPUs this process may use."""
    entries = listed(environ)
    if entries is not None:
        return len(entries)
    try:
        return sum(_opens(name) for name in os.listdir(DEV) if re.fullmatch(r"nvidia\d+", name))
    except OSError:
        return 0


def installed() -> list[Gpu]:
    """The GPUs that this process may open, in PCI order."""
    found = []
    try:
        addresses = os.listdir(PROC / "driver/nvidia/gpus")
    except OSError:
        return []
    for address in sorted(addresses, key=lambda one: (len(one), one)):
        told = _information(PROC / "driver/nvidia/gpus" / address / "information")
        minor = told.get("Device Minor", "")
        if told.get("GPU Excluded") == "Yes" or (minor and not _opens(f"nvidia{minor}")):
            continue
        uuid = told.get("GPU UUID", "")
        found.append(Gpu(address.lower(), "" if "?" in uuid else uuid, told.get("Model", "")))
    return found


def _opens(name: str) -> bool:
    """Whether this process may open a device. access() also respects device cgroups, and open() may take a second."""
    return os.access(DEV / name, os.R_OK | os.W_OK)


def _information(path: Path) -> dict[str, str]:
    """The fields of the driver's information file, with lines such as `GPU UUID: \t GPU-8a2b…`."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def locate(index: int, environ: Mapping[str, str]) -> tuple[str, str]:
    """The PCI address of the GPU with CUDA's `index`; or "" and the reason why it is unknown."""
    entries, gpus = listed(environ), installed()
    if entries is not None and index >= len(entries):
        return "", f"{VARIABLE} has no entry for it"
    name = str(index) if entries is None else entries[index]
    if not gpus:
        return "", f"{PROC}/driver/nvidia/gpus lists none"
    if not name.isdigit():
        return _by_uuid(name, gpus)
    if int(name) >= len(gpus):
        return "", f"there are {len(gpus)} GPUs that this process may open, and none has the number {name}"
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({gpu.model for gpu in gpus}) > 1:
        return "", "GPUs of several models are here, of which CUDA counts the fastest first; set " \
                   "CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them by UUID"  # fmt: skip
    return gpus[int(name)].address, ""


def _by_uuid(name: str, gpus: list[Gpu]) -> tuple[str, str]:
    whole = _parent(name) if name.startswith("MIG-") else name
    if not whole:
        return "", f"NVML does not tell which GPU {name} is a part of"
    fitting = [gpu.address for gpu in gpus if gpu.uuid.lower().startswith(whole.lower())]
    if len(fitting) == 1:
        return fitting[0], ""
    return "", f"{len(fitting) or 'none'} of the GPUs that this process may open fit{'s' * (not fitting)} {name}"


def _parent(mig: str) -> str:
    """The UUID of the GPU that a MIG device is part of; "" if unknown."""
    if mig.startswith("MIG-GPU-"):  # MIG-GPU-UUID/GPU instance/compute instance, of drivers before 470
        return mig.removeprefix("MIG-").partition("/")[0]
    return nvml.mig_parent(mig)
