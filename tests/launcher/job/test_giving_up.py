"""A rank that cannot start must not leave the others in MPI_Init: srun and MPICH's hydra would let them wait there."""

import os
import sys

import pytest
from phalanx import child_python
from phalanx.errors import FatalError
from phalanx.launcher import cli
from phalanx.launcher.job import mpi_env, mpirun, rank_bootstrap
from phalanx.launcher.job.mpi_env import RankPlacement
from phalanx.rank.options import Job, Options, encode_job

from ... import retries
from ...ranks import AS_ROOT
from ..jobs import Launched

pytestmark = retries.KILLS

HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


class Aborted(Exception):
    pass


@pytest.fixture
def under(monkeypatch):
    """The environment of a launcher; what would be executed raises Aborted with its command line."""
    for name in [*HYDRA, "OMPI_COMM_WORLD_RANK"]:
        monkeypatch.delenv(name, raising=False)

    def execve(program, words, environ):
        raise Aborted(words)

    monkeypatch.setattr(rank_bootstrap.os, "execve", execve)

    def set_(**environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

    return set_


def aborts(call, *args) -> list[str]:
    with pytest.raises(Aborted) as aborted:
        call(*args)
    (words,) = aborted.value.args
    return words


def test_it_joins_the_others_and_aborts(under, capsys):
    words = aborts(rank_bootstrap.give_up, FatalError("no port", 2), RankPlacement(0, 2, 0, 2, "srun"))
    assert words == child_python.command(*rank_bootstrap.ABORT, "2")
    assert "MPI.COMM_WORLD.Abort(int(sys.argv[1]))" in words[-2]
    assert capsys.readouterr().err == "phalanx: no port\n"
    aborts(rank_bootstrap.give_up, FatalError("", 3), RankPlacement(1, 2, 1, 2, "srun"))
    assert capsys.readouterr().err == ""


def test_where_nobody_waits(under):
    rank_bootstrap.give_up(FatalError("no port", 2), RankPlacement(0, 1, 0, 1, "srun"))
    under(OMPI_COMM_WORLD_RANK="0")  # its mpirun ends them
    rank_bootstrap.give_up(FatalError("no port", 2), RankPlacement(0, 2, 0, 2, "mpirun"))
    assert mpi_env.ends_together({"OMPI_COMM_WORLD_RANK": "1"}) and not mpi_env.ends_together(HYDRA)


@pytest.mark.parametrize("verb", [["serve"], ["batch", "-i", __file__, "-o", "{}/out.jsonl"]])
def test_what_rank_0_alone_sees(under, verb, monkeypatch, capsys, tmp_path):
    verb = [word.format(tmp_path) for word in verb]
    under(**HYDRA)
    assert aborts(cli.main, [*verb, "/no/such/model"])[-1] == "3"
    assert "model '/no/such/model':" in capsys.readouterr().err
    monkeypatch.setenv("PHALANX_DTYPE", "f99")
    assert aborts(cli.main, verb)[-1] == "2"
    assert "PHALANX_DTYPE 'f99' (environment)" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["serve", "batch"])
def test_what_every_rank_sees_or_none_joins(under, verb, capsys):
    under(**HYDRA)
    assert cli.main([verb, "--frob"]) == 2
    assert cli.main([verb, "--show-config", "--np", "3"]) == 2
    assert "--np 3," in capsys.readouterr().err


def test_a_rank_that_cannot_begin(under, monkeypatch, capsys):
    """Here the first without a device."""
    under(**HYDRA)
    monkeypatch.setattr(rank_bootstrap.linux, "die_with", lambda _: None)
    monkeypatch.setattr(rank_bootstrap.linux, "ignore", lambda _: None)
    monkeypatch.setattr(rank_bootstrap, "hold_drain", lambda: None)
    monkeypatch.setattr(rank_bootstrap.mpi_env, "gpus", lambda: 2)
    words = aborts(rank_bootstrap.join, Options(devices=(0,)), RankPlacement(1, 2, 1, 2, "srun"))
    assert words[-1] == "2"
    assert "lists 1 devices" in capsys.readouterr().err
    under(PMI_RANK="1", MPI_LOCALRANKID="1", PHALANX_JOB=encode_job(Job(options=Options(devices=(0,)))))
    assert aborts(rank_bootstrap.main)[-1] == "2"  # a supervised one under hydra


def test_a_job_without_its_model_ends_at_once(tmp_path):
    command = [sys.executable, "-m", "phalanx.launcher.cli", "serve", "/no/such/model", "--device", "cpu", "--p", "0"]
    with Launched(mpirun.command(mpirun.find(os.environ), 2, command), tmp_path, **AS_ROOT) as job:
        assert job.end(30) == 3  # --timeout is a minute
        assert job.output.count("phalanx: model '/no/such/model': ") == 1


@pytest.mark.long
def test_a_batch_job_that_is_done_ends_on_all_ranks(tmp_path):
    """Rank 0 alone sees that; with code 0, or a script would requeue it."""
    (tmp_path / "in.jsonl").write_text("")
    (tmp_path / "out.jsonl").write_text("")
    batch = ["batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--device", "cpu"]
    command = [sys.executable, "-m", "phalanx.launcher.cli", *batch, "--load-format", "dummy"]
    with Launched(mpirun.command(mpirun.find(os.environ), 2, command), tmp_path, **AS_ROOT) as job:
        assert job.end(40) == 0
        assert f"phalanx: {tmp_path}/out.jsonl" in job.output
