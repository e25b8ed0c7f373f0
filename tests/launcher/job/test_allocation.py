"""Hosts and slots of Slurm, PBS, LSF and Flux."""

import pytest
from phalanx.errors import USAGE, FatalError
from phalanx.launcher.job import allocation


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node1,node2", ["node1", "node2"]),
        ("gpu[01-03,07]", ["gpu01", "gpu02", "gpu03", "gpu07"]),
        ("gpu[1-2]-ib,login1", ["gpu1-ib", "gpu2-ib", "login1"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("a[1,3],b[08-10]", ["a1", "a3", "b08", "b09", "b10"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_host_lists(text, names):
    assert allocation.expand(text) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu[1-x]", "the host list 'gpu[1-x]' has a range that cannot be read: '1-x'"),
        ("gpu[3-1]", "the host list 'gpu[3-1]' has a range that cannot be read: '3-1'"),
        ("gpu[]", "the host list 'gpu[]' has a range that cannot be read: ''"),
        ("gpu[1", "the host list 'gpu[1' has a bracket without its other half"),
    ],
)
def test_garbled_host_lists(text, message):
    with pytest.raises(FatalError) as stop:
        allocation.expand(text)
    assert (str(stop.value), stop.value.code) == (message, USAGE)


def test_task_counts():
    assert allocation.counts("2(x3),1") == [2, 2, 2, 1]
    assert allocation.counts("4") == [4]
    with pytest.raises(FatalError) as stop:
        allocation.counts("2(x3")
    assert "task counts '2(x3' cannot" in str(stop.value)


def file(path, text):
    path.write_text(text)
    return str(path)


def test_slurm():
    environ = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_JOB_ID": "7"}
    found = allocation.find(environ)
    assert found.hosts == [("n1", 2), ("n2", 2), ("n3", 2), ("n4", 1)]
    assert (found.slots, found.job, found.gpus) == (7, "7", 0)
    assert found.source == "SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE"
    assert allocation.find({**environ, "SLURM_NTASKS_PER_NODE": "8"}).slots == 32
    assert allocation.find({**environ, "SLURM_GPUS_ON_NODE": "4"}).gpus == 4
    assert allocation.find({"SLURM_NODELIST": "n[1-2]"}).hosts == [("n1", 1), ("n2", 1)]


def test_slots_win():
    environ = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "64"}
    with pytest.raises(FatalError) as stop:
        allocation.find(environ)
    assert "SLURM_JOB_NODELIST 'n[1-2]' names 2" in str(stop.value)
    assert allocation.find(environ, slots=8).hosts == [("n1", 8), ("n2", 8)]


def test_pbs(tmp_path):
    environ = {"PBS_NODEFILE": file(tmp_path / "nodes", "b\nb\na\na\n\nb\n"), "PBS_JOBID": "1.server"}
    found = allocation.find(environ)
    assert (found.hosts, found.source, found.job) == ([("b", 3), ("a", 2)], "PBS_NODEFILE", "1.server")


def test_lsf(tmp_path):
    by_file = {"LSB_DJOB_HOSTFILE": file(tmp_path / "hosts", "a\na\nb\nb\n"), "LSB_HOSTS": "wrong", "LSB_JOBID": "5"}
    assert allocation.find(by_file).hosts == [("a", 2), ("b", 2)]
    assert allocation.find({"LSB_HOSTS": "a a b"}).hosts == [("a", 2), ("b", 1)]
    assert allocation.find({"LSB_MCPU_HOSTS": "a 16 b 8 "}).hosts == [("a", 16), ("b", 8)]
    with pytest.raises(FatalError) as stop:
        allocation.find({"LSB_MCPU_HOSTS": "a b 8"})
    assert "LSB_MCPU_HOSTS 'a b 8'" in str(stop.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FatalError) as stop:
        allocation.find({"PBS_NODEFILE": "/nowhere/nodes"})
    assert "PBS_NODEFILE /nowhere/nodes:" in str(stop.value)
    empty = file(tmp_path / "nodes", "\n")
    with pytest.raises(FatalError) as stop:
        allocation.find({"LSB_DJOB_HOSTFILE": empty})
    assert str(stop.value) == f"LSB_DJOB_HOSTFILE {empty} is empty"


def test_outside_an_allocation():
    with pytest.raises(FatalError) as stop:
        allocation.find({})
    assert stop.value.code == USAGE
    assert "LSB_DJOB_HOSTFILE, LSB_HOSTS or LSB_MCPU_HOSTS" in str(stop.value)


def test_both_kinds_of_hostfile():
    hosts = [("n1", 8), ("n2", 4)]
    assert allocation.hostfile(hosts, "openmpi") == "n1 slots=8\nn2 slots=4\n"
    assert allocation.hostfile(hosts, "mpich") == "n1:8\nn2:4\n"


def test_flux(tmp_path, monkeypatch):
    program = tmp_path / "flux"
    program.write_text('#!/bin/sh\n[ "$*" = "hostlist --local" ] && echo "gpu[08-09]"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    environ = {"FLUX_URI": "local:///run/flux/local", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert allocation.find(environ, 4).hosts == [("gpu08", 4), ("gpu09", 4)]
    program.write_text("#!/bin/sh\necho 'flux-hostlist: ERROR: no broker' >&2\nexit 1\n")
    with pytest.raises(FatalError, match="no broker") as stop:
        allocation.find(environ)
    assert stop.value.code == USAGE
    program.unlink()
    with pytest.raises(FatalError, match="flux hostlist"):
        allocation.find(environ)


def test_the_rank_file_of_lsf(tmp_path):
    (tmp_path / "ranks").write_text("n1\nn1\nn2\n")
    found = allocation.find({"LSB_DJOB_RANKFILE": str(tmp_path / "ranks"), "LSB_MCPU_HOSTS": "n1 2 n2 1"})
    assert (found.hosts, found.source) == ([("n1", 2), ("n2", 1)], "LSB_DJOB_RANKFILE")
