"""A fault on the far one of two hosts ends the job on both: named, in time, with nothing left."""

import os
import re
import signal
import time

import pytest

from .. import retries
from ..batch import Job, answers, finished, requests
from ..checkpoints import make_checkpoint
from ..processes import gone
from .hosts import HostsServer

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(180), retries.CLUSTER]

TIMEOUT = 10  # also what ranks that import torch side by side may take to meet
PATIENT = ("--device", "cpu", "--mem", "64")
ARGUMENTS = (*PATIENT, "--timeout", str(TIMEOUT))
MPIRUN_PATIENCE = 15  # seconds that a mpirun which waits for a lost node is given by rank 0's host
RANK = r"-m phalanx\.rank"  # and the server


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    place = tmp_path_factory.mktemp("faults") / "tiny"
    return make_checkpoint(place, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=32768)


def said(server: HostsServer, words: str, seconds: float) -> None:
    """Wait for a message of the job."""
    deadline = time.monotonic() + seconds
    while words not in server.output:
        assert time.monotonic() < deadline, server.output
        time.sleep(0.02)


def test_a_rank_is_lost_on_the_far_host(hosts, checkpoint):
    with HostsServer(hosts, str(checkpoint), *ARGUMENTS) as server:
        stream = server.stream()
        os.kill(max(hosts.far.processes(RANK)), signal.SIGKILL)
        assert server.exit_code(10) == 137, server.output
        found = [line.strip("\0\n") for line in server.lines if "has died" in line]  # mpirun may begin with a zero byte
        assert len(found) == 1 and re.search("rank [23] on node1", found[0])
        assert '"error"' in stream.rest()
        assert not hosts.left()


@pytest.fixture
def astray(hosts):
    """Addresses of the first host that the other one has as well, and such that its packets to them get lost."""
    shared, lost = "172.17.0.1/32", [f"10.99.{i}.1/32" for i in range(3)]
    made = [(host, f"addr add {shared} dev lo") for host in (hosts.near, hosts.far)]
    made += [(hosts.near, f"addr add {address} dev lo") for address in lost]
    made += [(hosts.far, "neigh add 10.77.0.99 lladdr 02:00:00:00:00:99 dev eth0")]  # which nobody has
    made += [(hosts.far, f"route add {address} via 10.77.0.99 dev eth0") for address in lost]
    try:
        for host, words in made:
            done = host.run("ip", *words.split())
            assert done.returncode == 0, done.stderr
        yield
    finally:
        for host, words in reversed(made):
            host.run("ip", *words.replace(" add ", " del ").split())


def test_addresses_that_lead_astray(hosts, checkpoint, astray):
    """Rank 0 has several, which the far ranks cannot tell apart: one after the other they would take too long."""
    with HostsServer(hosts, str(checkpoint), *ARGUMENTS) as server:
        assert server.request("/v1/completions", {"prompt": "hello", "max_tokens": 3})[0] == 200
        os.kill(max(hosts.far.processes(RANK)), signal.SIGKILL)
        assert server.exit_code(10) == 137, server.output
        assert "on node1 has died" in server.output
        assert not hosts.left()


@pytest.mark.parametrize("load", [False, True], ids=["idle", "load"])
def test_the_far_host_is_cut_off(hosts, checkpoint, load):
    """Nobody is told, so mpirun waits for the far host without end; the job does not."""
    with HostsServer(hosts, str(checkpoint), *ARGUMENTS) as server:
        stream = server.stream() if load else None
        hosts.cable("down")
        start = time.monotonic()
        said(server, f"did not answer for {TIMEOUT} s", TIMEOUT + 3)
        (line,) = [line for line in server.lines if "did not answer" in line]
        assert line.strip("\0").startswith("phalanx: rank ") and "on node1" in line and "on node0" not in line
        if stream is not None:
            assert "node1 did not answer" in stream.rest()
        # The ranks end on both hosts, each by its own watch.
        assert not hosts.left(TIMEOUT + 5 - (time.monotonic() - start), RANK)
        assert server.exit_code(MPIRUN_PATIENCE + 5) in (137, -signal.SIGKILL), server.output
        assert "rank 0" in server.output
        assert not hosts.near.processes()
        hosts.cable("up")
        assert not hosts.left(30)


def test_the_far_host_stands_still(hosts, checkpoint):
    """Its connections stay open. When it goes on, what runs there finds that the job is over."""
    with HostsServer(hosts, str(checkpoint), *ARGUMENTS) as server:
        stream = server.stream()
        stopped = hosts.far.stand_still()
        said(server, f"did not answer for {TIMEOUT} s", TIMEOUT + 3)
        assert "node1 did not answer" in stream.rest()
        assert server.exit_code(MPIRUN_PATIENCE + 10) in (137, -signal.SIGKILL), server.output
        assert not hosts.near.processes()
        hosts.far.go_on()
        assert gone(set(stopped) - {hosts.far.pid}), hosts.far.processes()


def test_a_batch_job_whose_far_host_is_cut_off_goes_on_where_it_was(hosts, checkpoint, tmp_path):
    names = requests(tmp_path / "in.jsonl", 60, 300)
    command = (str(checkpoint), "-i", "in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "16")
    journal = tmp_path / "out.jsonl.journal"
    try:
        with Job(tmp_path, *command, *ARGUMENTS, command=hosts.mpirun()) as job:
            job.until(lambda: finished(journal) > 10)
            hosts.cable("down")
            assert job.end(TIMEOUT + MPIRUN_PATIENCE + 10) in (137, -signal.SIGKILL), job.output
            assert "node1 did not answer" in job.output
        assert 10 < finished(journal) < 60 and not (tmp_path / "out.jsonl").exists()
        hosts.clear()
        with Job(tmp_path, *command, *PATIENT, command=hosts.mpirun()) as job:
            assert job.end(90) == 0, job.output
            assert "going on after" in job.output
        assert sorted(answers(tmp_path / "out.jsonl")) == sorted(names)
    finally:
        hosts.clear()
