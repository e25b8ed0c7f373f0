"""Rank, local rank and size from the environment, whoever started us."""

import pytest
from phalanx.errors import FatalError
from phalanx.launcher.job import mpi_env
from phalanx.launcher.job.mpi_env import RankPlacement

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
FLUX = {"FLUX_JOB_ID": "f1", "FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "2", "FLUX_TASK_RANK": "3",
        "FLUX_TASK_LOCAL_ID": "1", "FLUX_URI": "local:///run/flux/local"}  # fmt: skip
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "4", "SLURM_LOCALID": "0"}
PLACED = {"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_NTASKS": "6"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (OPENMPI, RankPlacement(3, 8, 1, 2, "mpirun")),
        (MPICH, RankPlacement(1, 2, 1, 2, "mpirun")),
        ({**STEP, **PLACED, "PMIX_RANK": "4"}, RankPlacement(4, 6, 0, 2, "srun")),
        ({**STEP, **PLACED, "PMI_RANK": "4", "PMI_SIZE": "6"}, RankPlacement(4, 6, 0, 2, "srun")),
        ({**STEP, **PLACED}, None),
        ({**FLUX, "PMI_RANK": "3", "PMI_SIZE": "4"}, RankPlacement(3, 4, 1, 2, "flux run")),
        ({**FLUX, "PMIX_RANK": "3"}, RankPlacement(3, 4, 1, 2, "flux run")),
        ({"FLUX_URI": "local:///run/flux/local"}, None),  # a batch script
        ({"SLURM_NTASKS": "6", "SLURM_PROCID": "0"}, None),  # the shell of an allocation
    ],
    ids=["none", "openmpi", "mpich", "srun-pmix", "srun-pmi2", "srun-without-pmi", "flux-pmi", "flux-pmix",
         "flux-batch", "allocation"],
)  # fmt: skip
def test_world(environ, expected):
    assert mpi_env.rank_placement(environ) == expected


# The second of two ranks on the second of two nodes, rank 3 of 4, as each launcher tells it. Seen with Open MPI 5.0.11,
# MPICH 5.0.2, Intel MPI 2021.19 and Slurm 22.05; PALS and jsrun after their manuals.
IN_A_STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
}  # fmt: skip
CARRIED = {  # mpirun's own daemons, one for each node, are the tasks of a step
    **IN_A_STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}  # fmt: skip
SECOND = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "OMPI_UNIVERSE_SIZE": "4", "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-node0-16299@1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "11", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
LAUNCHERS = {
    "Open MPI": SECOND,
    "Open MPI through srun": {**CARRIED, **SECOND},
    "Open MPI through PBS": {**SECOND, "PBS_JOBID": "7.pbs", "PBS_NODEFILE": "/x", "PBS_NODENUM": "1"},
    "Open MPI through LSF": {**SECOND, "LSB_JOBID": "7", "LSB_MCPU_HOSTS": "node0 2 node1 2", "LSF_PM_TASKID": "2"},
    "MPICH, Intel MPI": {**HYDRA, "HYDI_CONTROL_FD": "7", "PMI_HOSTNAME": "node1"},
    "MPICH through srun": {**CARRIED, **HYDRA},
    "srun --mpi=pmix": {**IN_A_STEP, "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.7.0"},
    "srun --mpi=pmi2": {**IN_A_STEP, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "13", "PMI_JOBID": "7.0"},
    "srun --mpi=cray_shasta": {**IN_A_STEP, "PALS_RANKID": "3", "PALS_NODEID": "1", "PMI_CONTROL_PORT": "20480"},
    "Cray's mpiexec": {
        "PALS_RANKID": "3", "PALS_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PBS_JOBID": "7.pbs",
    },
    "Cray's mpiexec with PMI": {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
    "jsrun": {
        "JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1",
        "JSM_NAMESPACE_LOCAL_SIZE": "2", "PMIX_RANK": "3", "LSB_JOBID": "7",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_launcher(name):
    launcher = "srun" if name.startswith("srun") else "mpirun"
    assert mpi_env.rank_placement(LAUNCHERS[name]) == RankPlacement(3, 4, 1, 2, launcher)
    assert mpi_env.codes_by_abort(LAUNCHERS[name]) == (name == "srun --mpi=pmix")
    left = mpi_env.without_mpi(LAUNCHERS[name])
    assert mpi_env.rank_placement(left | {"SLURM_NTASKS": "4"}) is None  # a process that must not join would


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({"SLURM_JOB_ID": "7"}, "7"), ({"PBS_JOBID": "7.pbs"}, "7.pbs"), ({"LSB_JOBID": "7"}, "7"), ({}, "")],
)
def test_batch_job(environ, expected):
    assert mpi_env.batch_job(environ) == expected


@pytest.mark.parametrize(("counts", "node", "expected"), [("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("2", 0, 2)])
def test_slurms_task_counts(counts, node, expected):
    environ = {**STEP, "PMIX_RANK": "0", "SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": str(node)}
    assert mpi_env.rank_placement(environ).local_size == expected


def test_task_counts_that_slurm_does_not_write():
    with pytest.raises(FatalError, match="counts.*'4x2'"):
        mpi_env.rank_placement({**STEP, "PMIX_RANK": "0", "SLURM_STEP_TASKS_PER_NODE": "4x2", "SLURM_NODEID": "0"})


def test_srun_without_pmi_is_refused_once():
    with pytest.raises(FatalError) as stop:
        mpi_env.refuse_lonely_srun({**STEP, "SLURM_PROCID": "0"})
    assert stop.value.code == 2
    assert "`srun --mpi=pmix phalanx serve" in str(stop.value)
    with pytest.raises(FatalError) as stop:
        mpi_env.refuse_lonely_srun(STEP)
    assert (str(stop.value), stop.value.code) == ("", 2)


@pytest.mark.parametrize(
    "environ",
    [{}, OPENMPI, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, {**STEP, "PMIX_RANK": "4"}, {"SLURM_NTASKS": "6"}],
)
def test_other_starts_are_no_lonely_srun(environ):
    mpi_env.refuse_lonely_srun(environ)


def test_the_server_gets_no_mpi_variable():
    kept = {"PATH": "p", "SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": "2", "HOME": "h", "OMP_NUM_THREADS": "1"}
    assert mpi_env.without_mpi({**kept, **OPENMPI, **MPICH, **STEP, "OPAL_PREFIX": "x", "PRTE_MCA_a": "b"}) == kept


def test_an_mpirun_of_our_own_is_no_part_of_a_step():
    user = {"PATH": "p", "OMPI_MCA_btl": "self", "SLURM_JOB_ID": "1"}
    shell = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0", "PMIX_SERVER_URI2": "x"}
    assert mpi_env.for_mpirun(user) == user
    assert mpi_env.for_mpirun(user | shell) == user
    assert mpi_env.for_mpirun(user | STEP) == user
    assert mpi_env.for_mpirun(user | OPENMPI) == {"PATH": "p", "SLURM_JOB_ID": "1"}


def test_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert mpi_env.gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert mpi_env.gpus() == 0
