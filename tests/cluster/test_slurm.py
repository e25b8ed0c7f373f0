"""Under a real Slurm of two nodes: a server, and a batch job that its time limit interrupts."""

import os
import signal
import subprocess
import time
from pathlib import Path

import phalanx
import pytest

from ..batch import answers, requests
from ..checkpoints import make_checkpoint
from ..processes import wait
from . import slurm as real
from .hosts import HostsServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SCRIPT = Path(phalanx.__file__).parent / "hostfiles" / "slurm-batch.sh"


@pytest.fixture(scope="module")
def slurm(hosts, tmp_path_factory):
    if reason := real.missing():
        pytest.skip(reason)
    try:
        running = real.Slurm(hosts, tmp_path_factory.mktemp("slurm"))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"Slurm cannot start here: {error}")
    with running:
        yield running


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
        assert "phalanx: rank 1 on node1 has died" in server.output
        assert not hosts.left()


@pytest.fixture
def script(checkpoint, tmp_path):
    """hostfiles/slurm-batch.sh as it is but for the GPUs and the command's options."""
    text = SCRIPT.read_text()
    there = "--model /path/to/model --d 0,1,2,3,4,5,6,7 --input requests.jsonl --output answers.jsonl"
    here = f"--model {checkpoint} --device cpu --mem 64 --max-num-seqs 1 --input in.jsonl --output out.jsonl"
    assert text.count(there) == text.count("#SBATCH --gpus-per-node=8\n") == 1
    path = tmp_path / "job.sh"
    path.write_text(text.replace(there, here).replace("#SBATCH --gpus-per-node=8\n", ""))
    return path


def run(slurm, script: Path, seconds: float = 400) -> tuple[dict[str, str], str]:
    """What Slurm says of the job once it has ended for good, and its log.

    Its limit is two minutes. The warning is asked for 45 s after each start, and comes 15 to 45 s after: Slurm looks at
    limits every half a minute, and gives the warnings that fall due until it looks again.
    """
    limits = ("--time=2", "--signal=B:USR1@75", "--nodes=2", "--ntasks-per-node=1")
    sent = slurm.run("sbatch", "--parsable", *limits, script.name, cwd=script.parent)
    assert sent.returncode == 0, sent.stderr
    job = sent.stdout.strip()

    def busy() -> bool:
        time.sleep(1)  # each look costs a process, and the job takes minutes, so one a second is enough
        return slurm.state(job)["JobState"] not in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")

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
