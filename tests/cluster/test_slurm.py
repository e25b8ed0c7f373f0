"""Under a real Slurm of two nodes: a server, and a batch job that its time limit interrupts."""

import json
import os
import re
import signal
import time
from pathlib import Path

import phalanx
import pytest

from .. import retries
from ..batch import answers, requests
from ..checkpoints import make_checkpoint
from ..fields import each
from ..processes import wait
from .hosts import HostsServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), retries.CLUSTER]

HOSTFILES = Path(phalanx.__file__).parent / "hostfiles"
SCRIPT = HOSTFILES / "slurm-batch.sh"
SCRIPTS = sorted(path.name for path in HOSTFILES.iterdir() if "\n#SBATCH " in path.read_text())
ENDED = "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("slurm") / "tiny", max_position_embeddings=4096)


def test_serve_in_a_step_of_two_tasks(slurm, hosts, checkpoint):
    """One task on each node; SIGUSR1 to srun drains."""
    command = hosts.near.enter("srun", "--mpi=pmix", "--nodes=2", "--ntasks-per-node=1")
    options = ("--device", "cpu", "--mem", "64", "--api-key", "none")
    with HostsServer(hosts, str(checkpoint), *options, command=command, SLURM_CONF=slurm.conf) as server:
        assert [len(host.processes(r"-m phalanx\.rank$")) for host in hosts.all] == [1, 1]
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "temperature": 0}
        status, answer, _ = server.request("/v1/chat/completions", body)
        assert status == 200 and answer["usage"]["completion_tokens"] > 0, answer
        server.process.send_signal(signal.SIGUSR1)
        assert server.exit_code(30) == 0, server.output
        assert not hosts.left()


def test_a_lost_task_ends_the_step(slurm, hosts, checkpoint):
    command = hosts.near.enter("srun", "--mpi=pmix", "--nodes=2", "--ntasks-per-node=1")
    options = ("--device", "cpu", "--mem", "64", "--timeout", "10")
    with HostsServer(hosts, str(checkpoint), *options, command=command, SLURM_CONF=slurm.conf) as server:
        os.kill(max(hosts.far.processes(r"-m phalanx\.rank$")), signal.SIGKILL)
        assert server.exit_code(20) == 137, server.output
        assert "phalanx: rank 1" in server.output
        assert not hosts.left()


@pytest.fixture
def script(checkpoint, tmp_path):
    """hostfiles/slurm-batch.sh as it is but for the GPUs and the command's options."""
    text = SCRIPT.read_text()
    there = "--model /path/to/model --d 0,1,2,3,4,5,6,7 --tp 8 --pp 2 --input requests.jsonl --output answers.jsonl"
    here = f"--model {checkpoint} --device cpu --mem 64 --max-num-seqs 1 --input in.jsonl --output out.jsonl"
    assert text.count(there) == text.count("#SBATCH --gpus-per-node=8\n") == 1
    path = tmp_path / "job.sh"
    path.write_text(text.replace(there, here).replace("#SBATCH --gpus-per-node=8\n", ""))
    return path


def run(slurm, script: Path, seconds: float = 400) -> tuple[dict[str, str], str]:
    """Slurm's fields of the job once it has ended for good, and its log.

    Its limit is two minutes. The warning is asked for 45 s after each start, and comes 15 to 45 s after: Slurm looks at
    limits every half a minute, and gives the warnings that fall due until it looks again.
    """
    limits = ("--time=2", "--signal=B:USR1@75", "--nodes=2", "--ntasks-per-node=1")
    sent = slurm.run("sbatch", "--parsable", *limits, script.name, cwd=script.parent)
    assert sent.returncode == 0, sent.stderr
    job = sent.stdout.strip()

    def busy() -> bool:
        time.sleep(1)  # each look costs a process, and the job takes minutes, so one a second is enough
        return slurm.state(job)["JobState"] not in ENDED

    rest = wait(busy, seconds)
    log = (script.parent / f"phalanx-{job}.log").read_text()
    assert not rest, log
    return slurm.state(job), log


def test_the_batch_script_requeues_itself_until_all_is_done(slurm, hosts, script):
    """The time limit interrupts it at least once. How much it answers in a start depends on the machine."""
    place, count, starts = script.parent, 30, 0
    while not starts and count < 10000:
        (place / "out.jsonl").unlink(missing_ok=True)
        names = requests(place / "in.jsonl", count, 200)
        state, log = run(slurm, script)
        print(log)
        assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), log
        starts, count = int(state["Restarts"]), count * 2
    assert log.count("going on after") == starts > 0
    warned = log.count("stopping, asked to by a signal: ")  # the last start too, where all else was answered by then
    assert starts <= warned <= starts + 1
    assert sorted(answers(place / "out.jsonl")) == sorted(names)
    assert not hosts.left()


def small(name: str) -> str:
    """A script of hostfiles/ for nodes of few cores without GPUs."""
    text = re.sub(r"^#SBATCH --(gpus-per-node|cpus-per-task)=\d+\n", "", (HOSTFILES / name).read_text(), flags=re.M)
    return re.sub(r"--ntasks-per-node=\d", "--ntasks-per-node=1", text)


@pytest.mark.parametrize("name", SCRIPTS)
def test_slurm_takes_the_directives(slurm, tmp_path, name):
    (tmp_path / name).write_text(small(name))
    done = slurm.run("sbatch", "--test-only", name, cwd=tmp_path)
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr


def test_an_array_of_servers(slurm, hosts, checkpoint, tmp_path):
    """Each is a job of its own, which the gateway's registry has, and drains when it is warned."""
    text = small("slurm-array.sbatch").replace("--array=0-3", "--array=0-1")
    assert text.count("--d 0,1,2,3,4,5,6,7") == 1
    (tmp_path / "job").write_text(text.replace("--d 0,1,2,3,4,5,6,7", "--device cpu --mem 64 --max-num-seqs 4"))
    (tmp_path / "keys").write_text("secret\n")
    given = f"MODEL={checkpoint},PHALANX_API_KEY_FILE={tmp_path}/keys,XDG_STATE_HOME={tmp_path}/state"
    sent = slurm.run("sbatch", "--parsable", f"--export=ALL,{given}", "job", cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    job, place = sent.stdout.strip(), tmp_path / "state" / "phalanx" / "jobs"

    def logs() -> str:
        return "".join(path.read_text() for path in tmp_path.glob("phalanx-*.log"))

    def ready() -> list[dict]:
        found = [json.loads(path.read_text()) for path in place.glob("*.json")]
        return [one for one in found if one["state"] == "ready" and one["key"] == "secret"]

    assert not wait(lambda: len(ready()) < 2, 120), logs()
    assert len(set(each(ready(), "url"))) == 2
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    states = [f"{job}_{task}" for task in range(2)]
    assert not wait(lambda: [one for one in states if slurm.state(one)["JobState"] not in ENDED], 60), logs()
    assert [slurm.state(one)["ExitCode"] for one in states] == ["0:0", "0:0"], logs()
    assert not hosts.left()
