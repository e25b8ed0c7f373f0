"""Many more ranks than cores: 32 under a user's own mpirun start, answer and drain."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from . import retries
from .checkpoints import make_checkpoint
from .ranks import under_mpirun
from .server import Server

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(900), retries.KILLS]


def test_thirty_two_ranks_on_a_few_cores(tmp_path):
    """Alone it takes two minutes on two cores, most of them for 32 imports of torch."""
    checkpoint = make_checkpoint(tmp_path / "tiny")
    layout = ("--tp", "2", "--pp", "4", "--dp", "4")
    few = ("--device", "cpu", "--mem", "16", "--max-num-seqs", "4", "--timeout", "300")
    with Server(str(checkpoint), *layout, *few, command=under_mpirun(32), wait=False) as server:
        server.wait_ready(600)
        assert len(server.ranks) == 32
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True}
        with ThreadPoolExecutor(8) as pool:  # more than one replica computes
            answers = list(pool.map(lambda _: server.request("/v1/chat/completions", body), range(8)))
        assert [status for status, *_ in answers] == [200] * 8
        assert all(answer["usage"]["completion_tokens"] == 8 for _, answer, _ in answers)
        os.kill(server.mpirun, signal.SIGUSR1)
        assert server.exit_code(120) == 0, server.output
        assert not server.left(30), server.output
