"""Weights on two hosts: read once by all, copied by each, and what one of them sees otherwise is named."""

import os
import re
import shutil

import pytest

from .. import retries
from ..checkpoints import make_checkpoint
from .hosts import HostsServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(180), retries.CLUSTER]

ARGUMENTS = ("--device", "cpu", "--mem", "64", "--timeout", "20")
PROMPT = {"prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0}
SECOND = "model-00002-of-00002.safetensors"
SCRATCH = "/run/scratch"  # each host has its own /run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("weights") / "tiny", num_attention_heads=8, num_key_value_heads=4, shards=2
    )


@pytest.fixture
def covered(hosts, checkpoint, tmp_path):
    """The far host's view in place of the checkpoint: a copy, to be changed."""
    other = shutil.copytree(checkpoint, tmp_path / "other")
    hosts.far.run("mount", "--bind", str(other), str(checkpoint)).check_returncode()
    yield other
    hosts.far.run("umount", str(checkpoint)).check_returncode()


def refused(hosts, *arguments, code=3):
    """The one thing that is said by a job that cannot load; nothing of it stays."""
    with HostsServer(hosts, *map(str, arguments), *ARGUMENTS, wait=False) as server:
        assert server.exit_code(60) == code, server.output
        assert not hosts.left()
    said = [line.rstrip("\n") for line in server.lines if line.startswith("phalanx: ")]
    assert len(said) == 1 and "Traceback" not in server.output, server.output
    return said[0].removeprefix("phalanx: ")


def test_weights_that_all_hosts_see_damaged(hosts, checkpoint, tmp_path):
    """One rank says it, whichever was first."""
    file = shutil.copytree(checkpoint, tmp_path / "bad") / SECOND
    data = file.read_bytes()
    file.write_bytes(data[:8] + b"\0" * 64 + data[72:])
    said = refused(hosts, file.parent)
    assert re.match(r"rank \d on node\d: ", said)
    assert str(file) in said
    assert "truncated" in said


def test_other_weights_on_the_far_host(hosts, checkpoint, covered):
    size = (covered / SECOND).stat().st_size
    os.truncate(covered / SECOND, 1000)
    assert re.search(f"node1.*{SECOND}.*1000 bytes.*{size} bytes", refused(hosts, checkpoint))


def test_no_model_on_the_far_host(hosts, checkpoint):
    parent = str(checkpoint.parent)
    hosts.far.run("mount", "-t", "tmpfs", "tmpfs", parent).check_returncode()
    try:
        assert re.search(f"node1.*{checkpoint}.*rank 0", refused(hosts, checkpoint))
    finally:
        hosts.far.run("umount", parent).check_returncode()


def test_a_file_that_is_damaged_on_the_far_host(hosts, checkpoint, covered):
    """A change of the same size is found by reading alone."""
    with (covered / SECOND).open("r+b") as file:
        file.write(b"\xff" * 8)
    said = refused(hosts, checkpoint, "--load", "direct")
    assert said.partition(": ")[0] in ("rank 2 on node1", "rank 3 on node1")
    assert f"{checkpoint}/{SECOND}" in said and "header" in said


def test_striped_and_staged_hosts_answer_as_direct_ones(hosts, checkpoint):
    answers = []
    for arguments, words in (
        (("--load", "direct"), ()),
        (("--load", "striped"), ("each byte once, by one of 4 ranks",)),
        (("--stage", SCRATCH), ("rank 0 on node0 staged ", "rank 2 on node1 staged ")),
    ):
        with HostsServer(hosts, str(checkpoint), *ARGUMENTS, *arguments) as server:
            status, body, _ = server.request("/v1/completions", PROMPT)
            assert status == 200
            answers.append(body["choices"][0]["text"])
            assert all(word in server.output for word in words), server.output
            assert server.output.count(" staged ") == sum(" staged " in word for word in words)
    assert len(answers[0]) > 5 and answers == [answers[0]] * 3
    for host in hosts.all:
        assert SECOND in host.run("sh", "-c", f"ls {SCRATCH}/*").stdout
        host.run("rm", "-r", SCRATCH).check_returncode()


def test_a_full_disk_on_the_far_host(hosts, checkpoint):
    hosts.far.run("mkdir", SCRATCH).check_returncode()
    hosts.far.run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", SCRATCH).check_returncode()
    try:
        said = refused(hosts, checkpoint, "--stage", SCRATCH, code=2)
        assert said.partition(": ")[0] in ("rank 2 on node1", "rank 3 on node1")
        assert f"--stage {SCRATCH}" in said and "copied" in said
    finally:
        hosts.far.run("umount", SCRATCH)
        for host in hosts.all:
            host.run("rm", "-r", SCRATCH)
