"""A server that nobody uses gives its allocation back; while it runs, its job file says where it is."""

import io
import os
import socket
import sys
from pathlib import Path

import pytest
from phalanx.launcher import cli
from phalanx.launcher.job import mpirun
from phalanx.rank.server import server_registry

from ... import retries
from ...checkpoints import make_checkpoint
from ...ranks import AS_ROOT
from ..jobs import Launched

pytestmark = [pytest.mark.timeout(90), retries.KILLS]
OPTIONS = ["--p", "0", "--device", "cpu", "--mem", "64", "--dtype", "f32", "--timeout", "30", "--idle-exit", "0.05"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("leaving") / "ckpt"))


@pytest.mark.parametrize("how", ["supervised", pytest.param("mpirun", marks=pytest.mark.long)])
def test_idle_exit(how, checkpoint, tmp_path, monkeypatch):
    command = [sys.executable, "-m", "phalanx.launcher.cli", "serve", checkpoint, *OPTIONS, "--api-key", "secret"]
    if how == "mpirun":
        command = mpirun.command(mpirun.find(os.environ), 2, command)
    else:
        command += ["--np", "1"]
    with Launched(command, tmp_path, XDG_STATE_HOME=str(tmp_path / "state"), SLURM_JOB_ID="991", **AS_ROOT) as job:
        place = server_registry.directory({"XDG_STATE_HOME": str(tmp_path / "state")})
        job.until(lambda: server_registry.running(place, socket.gethostname()), 40)
        (path,) = place.glob("*.json")
        (found,) = server_registry.running(place, socket.gethostname()).values()
        assert (found.key, found.batch, found.model) == ("secret", "991", Path(checkpoint).name)
        job.until(lambda: "Phalanx is ready: " in job.output, 60)
        assert f"ready: {found.url}/v1 (" in job.output
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        assert cli.main(["chat"]) == 0  # it finds the server and has its key
        assert job.end(30) == 0
        assert "0.05 minutes (--idle-exit):" in job.output
        assert job.no_directory() and not list(path.parent.iterdir())
