"""Rank, local rank and size from the environment, whoever started us."""

import pytest
from phalanx.launcher import hosts
from phalanx.launcher.hosts import World
from phalanx.rank.exits import Stop

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "4", "SLURM_LOCALID": "0"}
PLACED = {"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_NTASKS": "6"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (OPENMPI, World(3, 8, 1, 2, "mpirun")),
        (MPICH, World(1, 2, 1, 2, "mpirun")),
        ({**STEP, **PLACED, "PMIX_RANK": "4"}, World(4, 6, 0, 2, "srun")),
        ({**STEP, **PLACED, "PMI_RANK": "4", "PMI_SIZE": "6"}, World(4, 6, 0, 2, "srun")),
        ({**STEP, **PLACED}, None),
        ({"SLURM_NTASKS": "6", "SLURM_PROCID": "0"}, None),  # the shell of an allocation
    ],
    ids=["none", "openmpi", "mpich", "srun-pmix", "srun-pmi2", "srun-without-pmi", "allocation"],
)
def test_world(environ, expected):
    assert hosts.world(environ) == expected


@pytest.mark.parametrize(("counts", "node", "expected"), [("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("2", 0, 2)])
def test_slurms_task_counts(counts, node, expected):
    environ = {**STEP, "PMIX_RANK": "0", "SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": str(node)}
    assert hosts.world(environ).local_size == expected


def test_srun_without_pmi_is_refused_once():
    with pytest.raises(Stop) as stop:
        hosts.refuse_lonely_srun({**STEP, "SLURM_PROCID": "0"})
    assert stop.value.code == 2
    assert str(stop.value).startswith(
        "srun started 6 tasks without telling them of each other; use `srun --mpi=pmix phalanx serve …` with Open MPI"
    )
    with pytest.raises(Stop) as stop:
        hosts.refuse_lonely_srun(STEP)
    assert (str(stop.value), stop.value.code) == ("", 2)


@pytest.mark.parametrize(
    "environ",
    [{}, OPENMPI, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, {**STEP, "PMIX_RANK": "4"}, {"SLURM_NTASKS": "6"}],
)
def test_other_starts_are_no_lonely_srun(environ):
    hosts.refuse_lonely_srun(environ)


def test_the_front_gets_no_mpi_variable():
    kept = {"PATH": "p", "SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": "2", "HOME": "h", "OMP_NUM_THREADS": "1"}
    assert hosts.without_mpi({**kept, **OPENMPI, **MPICH, **STEP, "OPAL_PREFIX": "x", "PRTE_MCA_a": "b"}) == kept


def test_an_mpirun_of_our_own_is_no_part_of_a_step():
    user = {"PATH": "p", "OMPI_MCA_btl": "self", "SLURM_JOB_ID": "1"}
    shell = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0", "PMIX_SERVER_URI2": "x"}
    assert hosts.for_mpirun(user) == user
    assert hosts.for_mpirun(user | shell) == user
    assert hosts.for_mpirun(user | STEP) == user
    assert hosts.for_mpirun(user | OPENMPI) == {"PATH": "p", "SLURM_JOB_ID": "1"}


def test_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert hosts.gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hosts.gpus() == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(hosts.os, "listdir", lambda _: ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"])
    assert hosts.gpus() == 2
