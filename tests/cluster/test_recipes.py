"""The scripts of hostfiles/ as a batch system runs them: two CPU ranks serve, and read what the system tells them.

tests/launcher/test_scripts.py checks the scripts without ranks; tests/cluster/test_slurm.py has a real Slurm.
"""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import phalanx
import pytest
import yaml

from .. import processes, ranks, retries
from ..fields import each
from ..server import PHALANX, Server
from . import stand_ins
from .stand_ins import GPUS, LEFT

pytestmark = [pytest.mark.long, pytest.mark.timeout(180), retries.CLUSTER]
HOSTFILES = Path(phalanx.__file__).resolve().parent / "hostfiles"


class Job(Server):
    """A script that was submitted; the server in it."""

    def __init__(self, place: Path, words: list[str], stdin: Path | None = None, **env: str):
        home = {"XDG_STATE_HOME": str(place / "state"), "MODEL": "/m o d e l", "STORE": str(place / "store")}
        tools = stand_ins.install(place, PHALANX, ranks.under_mpirun(2))
        clean = {"OMPI_MCA_plm": "^slurm,rsh", "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
        submit = ["bash", "-c", f'exec "$@" < {stdin or "/dev/null"}', "submit", *words]
        self.place = place
        super().__init__(job=submit, **tools, **clean, **home, **env)

    def calls(self, name: str) -> list:
        return [one for one in stand_ins.calls(self.place) if one["name"] == name]

    @property
    def registered(self) -> dict:
        (path,) = (self.place / "state" / "phalanx" / "jobs").glob("*.json")
        return json.loads(path.read_text())

    def ask(self) -> int:
        key = {"Authorization": f"Bearer {self.registered['key']}"}
        return self.request("/v1/completions", {"prompt": "x", "max_tokens": 2}, **key)[0]

    def drain(self, starter: str) -> int:
        """Signal what starts the ranks, as the script does; the script's code."""
        os.kill(self.calls(starter)[-1]["pid"], signal.SIGUSR1)
        return self.exit_code(60)


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("slurm-one-node.sbatch", GPUS),
        ("slurm.sbatch", 2 * GPUS),
        ("slurm-array.sbatch", GPUS),
        ("slurm-apptainer.sbatch", 2 * GPUS),
        ("slingshot.sbatch", 8),
    ],
)
def test_slurm(tmp_path, name, tasks):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    env = {"PHALANX_API_KEY_FILE": str(keys)} if "array" in name else {"ENVIRONMENT": "/e d f.toml"}
    with Job(tmp_path, ["sbatch", str(HOSTFILES / name)], **env) as job:
        (srun,) = job.calls("srun")
        assert srun["words"][0] == "--mpi=pmix" and int(srun["tasks"]) == tasks
        assert len(job.ranks) == 2 and job.ask() == 200
        assert job.registered["batch"] == "42" and len(job.calls("phalanx")) == 2
        if "apptainer" in name:
            (image,) = {one["words"][4] for one in job.calls("apptainer")}
            assert image == "phalanx.sif" and job.calls("apptainer")[0]["words"][3] == "/m o d e l"
        given = [word for word in srun["words"] if word.startswith("--environment")]
        assert given == ["--environment=/e d f.toml"] * (name == "slingshot.sbatch")
        if "array" in name:
            assert job.registered["key"] == "secret"
        assert job.drain("srun") == 0


def test_a_service_of_slurm(tmp_path):
    """Slurm's figures of the job decide what the next one is submitted with, and when."""
    with Job(tmp_path, ["sbatch", str(HOSTFILES / "slurm-service.sbatch")]) as job:
        assert {one["words"][0] for one in job.calls("scontrol")} == {"show", "write"}
        assert abs(job.registered["end"] - time.time() - LEFT) < 300 and job.ask() == 200
        assert (tmp_path / "store").is_dir()
        assert job.drain("srun") == 0


@pytest.mark.parametrize(
    ("name", "submit", "source"),
    [
        ("pbs.sh", ["qsub", "-v", "MODEL=/m"], "PBS_NODEFILE"),
        ("lsf.sh", ["bsub"], "LSB_DJOB_RANKFILE"),
    ],
)
def test_pbs_and_lsf(tmp_path, monkeypatch, name, submit, source):
    monkeypatch.chdir(tmp_path)
    script = HOSTFILES / name
    words, stdin = (submit, script) if name == "lsf.sh" else ([*submit, str(script)], None)
    with Job(tmp_path, words, stdin) as job:
        (started,) = job.calls("mpirun")
        assert started["slots"] == {"node1": GPUS, "node2": GPUS} and started["ranks"] == 2 * GPUS
        (hosts,) = tmp_path.glob("phalanx-hosts-*")
        assert source in hosts.read_text()
        assert len(job.ranks) == 2 and job.ask() == 200
        assert job.registered["batch"].startswith("42")
        assert job.drain("mpirun") == 0
        assert not hosts.exists()


@pytest.mark.parametrize(
    ("name", "submit", "again"),
    [
        ("pbs.sh", ["qsub", "-v", "MODEL=/m"], "qsub -v PHALANX_PREDECESSOR,PHALANX_SERVICE {}"),
        ("lsf.sh", ["bsub"], "bsub < {}"),
    ],
)
def test_a_service_of_pbs_and_lsf(tmp_path, monkeypatch, name, submit, again):
    """The batch system tells when the job is ended, and the successor is submitted and looked after in time."""
    monkeypatch.chdir(tmp_path)
    script = HOSTFILES / name
    words, stdin = (submit, script) if name == "lsf.sh" else ([*submit, str(script)], None)
    lead = {"PHALANX_HANDOVER": str(LEFT - 15), "PHALANX_RESUBMIT_COMMAND": again.format(script)}
    with Job(tmp_path, words, stdin, PHALANX_RESUBMIT="1", **lead) as job:
        assert abs(job.registered["end"] - time.time() - LEFT) < 300 and job.ask() == 200
        look = "qstat" if name == "pbs.sh" else "bjobs"
        successor = "43.server" if name == "pbs.sh" else "43"
        assert not processes.wait(lambda: successor not in sum(each(job.calls(look), "words"), []), 60), job.output
        (file,) = (tmp_path / "state" / "phalanx" / "jobs").glob("*.json")
        assert each(job.calls(submit[0]), "predecessor") == [None, file.stem]
        assert job.drain("mpirun") == 0


def test_flux(tmp_path, monkeypatch):
    monkeypatch.chdir(HOSTFILES.parent)
    with Job(tmp_path, ["flux", "batch", str(HOSTFILES / "flux.sh")]) as job:
        assert len(job.ranks) == 2 and job.ask() == 200
        assert job.registered["batch"] == "f1"
        assert abs(job.registered["end"] - time.time() - LEFT) < 300  # as `flux job timeleft` told
        serve = job.calls("phalanx")[0]["words"]
        command = serve[serve.index("--resubmit-command") + 1]
        tools = os.environ | stand_ins.install(tmp_path, PHALANX, []) | {"FLUX_URI": "local:///run/flux/local"}
        told = subprocess.run(["sh", "-c", command], env=tools, capture_output=True, text=True, timeout=60).stdout
        assert re.fullmatch(r"\d+\n", told)
        assert ["--parent", "batch", str(HOSTFILES / "flux.sh")] in each(job.calls("flux"), "words")
        run = next(one["pid"] for one in job.calls("flux") if one["words"][0] == "run")
        os.kill(run, signal.SIGUSR1)
        assert job.exit_code(60) == 0


def test_kubernetes(tmp_path):
    """The launcher's command, with a hostfile as the operator writes it."""
    job, _ = yaml.safe_load_all((HOSTFILES / "mpijob.yaml").read_text())
    (launcher,) = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    workers = [f"phalanx-worker-{i}.phalanx.default.svc" for i in range(2)]
    (tmp_path / "hostfile").write_text("".join(f"{name} slots={GPUS}\n" for name in workers))
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    places = {"/etc/mpi/hostfile": str(tmp_path / "hostfile"), "/keys/keys": str(keys)}
    words = [places.get(word, word) for word in launcher["command"] + launcher["args"]]
    with Job(tmp_path, words) as running:
        (started,) = running.calls("mpirun")
        assert started["slots"] == dict.fromkeys(workers, GPUS)
        assert started["ranks"] == 2 * GPUS
        assert len(running.ranks) == 2 and running.registered["key"] == "secret" and running.ask() == 200
        assert running.drain("mpirun") == 0
