"""The GPUs of this host as NVML, the driver's library, shows them. It needs no CUDA context, and knows nothing of
CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import msgspec

# How two GPUs reach each other over PCIe, by NVML's levels, in nvidia-smi's words.
PCIE = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
NVLINK = "NVLink"


class Gpu(msgspec.Struct, frozen=True):
    index: int
    name: str
    total: int  # bytes of memory; 0: unknown
    used: int
    bus: str  # PCI address, as in sysfs: 0000:1b:00.0


class Node(msgspec.Struct, frozen=True):
    """The GPUs of this host, and the driver that they have."""

    driver: str
    gpus: list[Gpu]
    links: list[str]  # kinds between them, the commonest first


@contextlib.contextmanager
def library() -> Iterator[Any]:
    """NVML's functions. Raises OSError where there are none, and for calls that fail."""
    try:
        import pynvml
    except ImportError:
        raise OSError("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from None


def _handles(nvml: Any) -> Iterator[tuple[int, Any]]:
    """The GPUs that this process may use, by number."""
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):
            yield index, nvml.nvmlDeviceGetHandleByIndex(index)


def node() -> Node:
    """Raises OSError where NVML cannot tell."""
    with library() as nvml:
        handles = dict(_handles(nvml))
        gpus = [_gpu(nvml, index, handle) for index, handle in handles.items()]
        kinds = [_link(nvml, one, other) for one, other in combinations(handles.values(), 2)]
        links = sorted(set(kinds), key=lambda kind: (-kinds.count(kind), kind))
        return Node(nvml.nvmlSystemGetDriverVersion(), gpus, links)


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    pci = nvml.nvmlDeviceGetPciInfo(handle)
    total = used = 0
    with contextlib.suppress(nvml.NVMLError):  # a GPU that has the host's memory
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, used = memory.total, memory.used
    bus = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
    return Gpu(index, nvml.nvmlDeviceGetName(handle), total, used, bus)


def _link(nvml: Any, one: Any, other: Any) -> str:
    with contextlib.suppress(nvml.NVMLError):
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == nvml.NVML_P2P_STATUS_OK:
            return NVLINK
    level = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    return PCIE.get(level, f"level {level}")


def mig_parent(mig: str) -> str:
    """The UUID of the GPU that has the MIG device whose UUID begins so; "" unless there is one such GPU."""
    parents = set()
    with contextlib.suppress(OSError), library() as nvml:
        for _, handle in _handles(nvml):
            with contextlib.suppress(nvml.NVMLError):  # a GPU that cannot be divided
                if any(uuid.lower().startswith(mig.lower()) for uuid in _mig_uuids(nvml, handle)):
                    parents.add(nvml.nvmlDeviceGetUUID(handle))
    return parents.pop() if len(parents) == 1 else ""


def _mig_uuids(nvml: Any, handle: Any) -> Iterator[str]:
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):  # there may be fewer
            yield nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))


def joules(gpus: Sequence[str]) -> float:
    """The energy that GPUs have used since the driver was loaded. gpus: numbers, or UUIDs as CUDA takes them.

    Raises OSError where NVML cannot tell.
    """
    with library() as nvml:
        return float(sum(nvml.nvmlDeviceGetTotalEnergyConsumption(_find(nvml, gpu)) for gpu in gpus)) / 1000


def _find(nvml: Any, gpu: str) -> Any:
    """The handle of a GPU. Of a UUID CUDA takes a beginning that fits one alone, NVML the whole only."""
    if gpu.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(gpu))
    fitting = [handle for _, handle in _handles(nvml) if nvml.nvmlDeviceGetUUID(handle).lower().startswith(gpu.lower())]
    if len(fitting) != 1:
        raise OSError(f"{len(fitting)} GPUs have a UUID that begins with {gpu}")
    return fitting[0]
