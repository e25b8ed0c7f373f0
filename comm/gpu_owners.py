"""Checks that no two ranks compute on the same GPU, once all ranks have chosen theirs.

Indices cannot tell: each rank may see one GPU only, as index 0. srun gives each task another one; mpirun in a job with
--gpus-per-task gives all ranks of a node the same one.
"""

from __future__ import annotations

import ctypes
import os
from uuid import UUID

import torch

from ..errors import USAGE, FatalError
from .base import HostComm
from .broadcast import gather_bytes
from .symmetric_memory import call

VARIABLE = "CUDA_VISIBLE_DEVICES"


def uuid(device: torch.device) -> str:
    """The UUID of a GPU, or of the MIG device that this process sees; "" for the CPU, or unknown."""
    if device.type != "cuda":
        return ""
    number, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    try:
        call("cuDeviceGet", ctypes.byref(number), device.index)
        call("cuDeviceGetUuid_v2", ctypes.byref(found), number)
    except RuntimeError:
        return ""
    return str(UUID(bytes=bytes(found)))


def check(world: HostComm, hosts: list[str], device: torch.device) -> None:
    """Raises FatalError on the first rank whose GPU another rank has too. Collective over world.

    The other ranks then do not return: they wait for the end of the job, so the user gets one message.
    """
    words = [text.decode().split("\n") for text in gather_bytes(world, f"{uuid(device)}\n{_shown()}".encode())]
    owners: dict[str, int] = {}
    for rank, (gpu, shown) in enumerate(words):
        first = owners.setdefault(gpu, rank) if gpu else rank
        if first == rank:
            continue
        if world.rank == rank:
            raise FatalError(
                f"ranks {first} and {rank} on {hosts[rank]} compute on the same GPU, {gpu} ({VARIABLE} {shown}): each "
                "needs one of its own; let every rank see all GPUs of its node, or let srun give each one with "
                "--gpus-per-task=1",
                USAGE,
            )
        world.barrier()  # never returns: that rank ends the job


def _shown() -> str:
    value = os.environ.get(VARIABLE)
    return "is not set" if value is None else f"is {value!r}"
