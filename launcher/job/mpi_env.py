"""The MPI environment: this process's rank, the number of ranks, and who started it, from OMPI_*, SLURM_* and others.

Only this file and allocation.py read such variables.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import msgspec

from ...errors import USAGE, FatalError
from . import allocation, visible_devices

# Variables by which MPI recognises that a process belongs to a job. Processes that must not join get none of them.
_MPI_PREFIXES = (
    "OMPI_", "PMIX_", "PMI_", "PRTE_", "OPAL_", "MPI_LOCAL", "MPIR_", "HYDRA_", "HYDI_", "I_MPI_", "PALS_", "JSM_",
    "FLUX_JOB_", "FLUX_TASK_", "FLUX_PMI_", "FLUX_KVS_",
)  # fmt: skip
_STEP_PREFIXES = ("SLURM_STEP", "SLURM_PMI", "SLURM_MPI")
_STEP_NAMES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASK_PID", "SLURM_GTIDS")

# SLURM_LOCALID comes last: it counts mpirun's daemons where mpirun uses srun to reach the nodes.
_LOCAL_RANK = (
    "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID", "SLURM_LOCALID",
)  # fmt: skip
_LOCAL_SIZE = (
    "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_SIZE",
)  # fmt: skip


class RankPlacement(msgspec.Struct, frozen=True):
    """This process's place in the job that started it."""

    rank: int
    size: int
    local_rank: int
    local_size: int  # ranks of the job on this host; 1 if unknown
    launcher: str  # for messages: "mpirun", "srun", …


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def rank_placement(environ: Mapping[str, str]) -> RankPlacement | None:
    """This process's place in an MPI job; None where no MPI launcher started it.

    OMPI_*: Open MPI 4 and 5. PMI_* and MPI_LOCAL*: MPICH, Intel MPI. PMIX_RANK or PMI_* with SLURM_*: srun. PALS_*:
    Cray's mpiexec. JSM_*: LSF's jsrun. FLUX_*: flux run, beside PMI_* or PMIX_RANK (flux-environment(7)).
    """
    rank = _number(environ, "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID", "JSM_NAMESPACE_RANK")
    size = _number(environ, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    own = "OMPI_COMM_WORLD_RANK" in environ or "MPI_LOCALRANKID" in environ  # by mpirun, perhaps in a Slurm step
    launcher = "srun" if "SLURM_STEP_ID" in environ and not own else "mpirun"
    if "FLUX_TASK_RANK" in environ and not own:
        launcher = "flux run"
    if size is None:
        names = "FLUX_JOB_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "PALS_SIZE", "JSM_NAMESPACE_SIZE"
        size = _number(environ, *names)
    if rank is None or size is None:
        return None
    local_rank = _number(environ, *_LOCAL_RANK)
    local_size = _number(environ, *_LOCAL_SIZE)
    if local_size is None and launcher == "flux run":
        local_size = -(-size // (_number(environ, "FLUX_JOB_NNODES") or 1))
    elif local_size is None:
        local_size = _slurm_local_size(environ, size)
    return RankPlacement(rank, size, rank if local_rank is None else local_rank, local_size, launcher)


def _slurm_local_size(environ: Mapping[str, str], size: int) -> int:
    """This node's tasks, among those of all nodes."""
    tasks, node = environ.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(environ, "SLURM_NODEID")
    counts = allocation.counts(tasks) if tasks else []
    if node is not None and node < len(counts):
        return counts[node]
    return size if "SLURM_STEP_ID" not in environ else 1


def ends_together(environ: Mapping[str, str]) -> bool:
    """Whether the launcher ends all ranks when one of them ends with an error before MPI_Init."""
    return "OMPI_COMM_WORLD_RANK" in environ


def codes_by_abort(environ: Mapping[str, str]) -> bool:
    """Whether only MPI_Abort passes a rank's exit code on. That is so for srun with PMIx.

    It kills the other ranks when one ends without MPI_Finalize, and reports that kill instead of the rank's code.
    Slurm 22.05 ends with 137 for a rank that exits with 3, but with 3 for one that calls MPI_Abort(3).
    """
    return "PMIX_RANK" in environ and "SLURM_STEP_ID" in environ and not ends_together(environ)


def refuse_lonely_srun(environ: Mapping[str, str]) -> None:
    """Raises FatalError under srun without PMI, where each of N processes would become a server of its own."""
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS") or 1
    if "SLURM_STEP_ID" not in environ or tasks == 1 or rank_placement(environ) is not None:
        return
    if _number(environ, "SLURM_PROCID"):
        raise FatalError("", USAGE)  # task 0 prints the reason
    raise FatalError(
        f"srun started {tasks} tasks without telling them of each other; use `srun --mpi=pmix phalanx serve …` with "
        "Open MPI or `srun --mpi=pmi2 …` with MPICH (`srun --mpi=list` shows what this Slurm has)",
        USAGE,
    )


def without_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that must not join the MPI job, such as the server process."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_MPI_PREFIXES + _STEP_PREFIXES) and name not in _STEP_NAMES
    }


def for_mpirun(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for the supervisor's mpirun, which may run inside a job of one process (`srun --pty bash`).

    There it must not take itself for a part of that job, so it gets none of the job's variables. Settings of the MPI
    library are the user's and stay, except inside another mpirun, which sets such variables itself.
    """
    if rank_placement(environ) is None and "SLURM_STEP_ID" not in environ:
        return dict(environ)
    settings = () if "OMPI_COMM_WORLD_RANK" in environ else ("OMPI_", "OPAL_", "PRTE_MCA_", "I_MPI_", "HYDRA_")
    users = {name: value for name, value in environ.items() if settings and name.startswith(settings)}
    return without_mpi(environ) | users


def end_time(environ: Mapping[str, str]) -> float:
    """When Slurm ends this job, as Unix time; 0: unknown."""
    return float(_number(environ, "SLURM_JOB_END_TIME") or 0)


def batch_job(environ: Mapping[str, str]) -> str:
    """The batch system's name for this job; "" outside one."""
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"):
        if environ.get(name):
            return environ[name]
    return ""


def hostname() -> str:
    return socket.gethostname()


def gpus() -> int:
    """How many GPUs this process may use, counted without CUDA."""
    return visible_devices.count(os.environ)


def check_device(device: str) -> None:
    """Raises FatalError where --device asks for a GPU and this host has none."""
    if device == "cuda" and not gpus():
        raise FatalError(f"--device cuda: no GPU was found on {hostname()}; --device cpu computes without", USAGE)
