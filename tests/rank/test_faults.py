"""A rank that dies, raises, hangs or stops ends the job in time, with one message that names it."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from phalanx import errors
from phalanx.comm import threads
from phalanx.comm.nccl import NcclComm
from phalanx.comm.watchdog import LocalWatchdog
from phalanx.rank.__main__ import Rank
from phalanx.rank.options import JOB_ENV, Job, Options, encode_job

from .. import retries
from ..checkpoints import make_checkpoint
from ..engine import Engine, greedy
from ..processes import gone, kill, wait
from ..ranks import MEMORY, environment, quick

pytestmark = [pytest.mark.timeout(240), retries.KILLS]
HOST = socket.gethostname()
IDLE_OR_NOT = [pytest.param(False, id="idle", marks=pytest.mark.long), pytest.param(True, id="load")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("faults") / "ckpt"
    return make_checkpoint(directory, tokenizer=False, max_position_embeddings=4096)


def work(engine: Engine) -> None:
    """Put the engine under load: long sequences, the first tokens of which have come."""
    from phalanx.rank import protocol

    engine.send(*(protocol.Request(str(i), protocol.pack_u32([5, 6, 7 + i]), greedy(400)) for i in range(4)))
    next(m for m in engine.messages() if isinstance(m, protocol.Deltas))


@pytest.mark.parametrize("load", IDLE_OR_NOT)
def test_sigkill_of_a_follower(checkpoint, load):
    ranks = 2 if load else 3
    with Engine(checkpoint, ranks) as engine:
        if load:
            work(engine)
        os.kill(engine.ready.pids[-1], signal.SIGKILL)
        assert engine.wait(30) == 137
        assert engine.fatal is not None and re.search(f"rank {ranks - 1}.*{HOST}.*died", engine.fatal.message)
        assert engine.fatal.code == 137
        assert gone(engine.ready.pids)
        assert engine.log().count("has died") == 1


@pytest.mark.long
def test_sigkill_of_rank_0(checkpoint):
    with Engine(checkpoint, 2) as engine:
        work(engine)
        os.kill(engine.ready.pids[0], signal.SIGKILL)
        assert engine.wait(30) == 137
        assert gone(engine.ready.pids)


@pytest.mark.parametrize("load", IDLE_OR_NOT)
def test_sigkill_of_mpirun(checkpoint, load):
    with Engine(checkpoint, 2) as engine:
        if load:
            work(engine)
        kill([engine.process.pid])
        assert engine.wait(30) == -9
        assert gone(engine.ready.pids)


@pytest.mark.alone
@pytest.mark.parametrize("load", IDLE_OR_NOT)
def test_a_stopped_follower_is_named_within_the_timeout(checkpoint, load):
    with Engine(checkpoint, 2 if load else 3, timeout=4) as engine:
        if load:
            work(engine)
        os.kill(engine.ready.pids[1], signal.SIGSTOP)
        start = time.monotonic()
        assert engine.wait(30) == 71
        assert time.monotonic() - start < 4 + 3
        assert engine.fatal is not None and f"rank 1 on {HOST}" in engine.fatal.message
        assert gone(engine.ready.pids)


@pytest.mark.long
@pytest.mark.alone
def test_a_stopped_rank_0_is_named_by_rank_1(checkpoint):
    with Engine(checkpoint, 3, timeout=6) as engine:
        os.kill(engine.ready.pids[0], signal.SIGSTOP)
        assert engine.wait(30) == 71
        assert f"rank 0 on {HOST}" in engine.log()
        assert gone(engine.ready.pids)


def faulty(checkpoint, monkeypatch, fault: str, ranks: int = 2, **options) -> Engine:
    monkeypatch.setenv("FAULT", fault)
    return Engine(checkpoint, ranks, program=quick(Path(__file__).parent / "faulty.py"), **options)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_an_exception_in_a_step(checkpoint, monkeypatch, rank):
    with faulty(checkpoint, monkeypatch, f"step:{rank}:5") as engine:
        work(engine)
        assert engine.wait(30) == 70
        want = f"rank {rank} on {HOST}: ZeroDivisionError: made to fail"
        assert engine.fatal is not None and engine.fatal.message == want
        assert engine.log().count(f"phalanx: {want}") == 1
        assert "Traceback" in engine.log()
        assert gone(engine.ready.pids)


@pytest.mark.long
@pytest.mark.parametrize(
    "place, words",
    [
        ("memory", "CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("host-memory", "DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_that_runs_out_in_a_step(checkpoint, monkeypatch, place, words):
    with faulty(checkpoint, monkeypatch, f"{place}:1:5") as engine:
        work(engine)
        assert engine.wait(30) == errors.MEMORY
        assert engine.fatal is not None and engine.fatal.code == errors.MEMORY
        assert f"{HOST}: not enough memory" in engine.fatal.message
        assert words in engine.fatal.message and "More words" not in engine.fatal.message
        for option in ("--max-num-batched-tokens", "--max-num-seqs", "--kv-fraction", "--mem"):
            assert option in engine.fatal.message
        assert gone(engine.ready.pids)


def test_a_rank_that_hangs_in_a_step_is_named(checkpoint, monkeypatch):
    with faulty(checkpoint, monkeypatch, "hang:1:5", timeout=4) as engine:
        work(engine)
        assert engine.wait(30) == 71
        assert engine.fatal is not None
        assert f"rank 1 on {HOST}." in engine.fatal.message
        assert "--timeout" in engine.fatal.message
        assert gone(engine.ready.pids)


@pytest.mark.long
@pytest.mark.alone
def test_a_rank_of_another_replica_that_hangs_is_named(checkpoint, monkeypatch):
    with faulty(checkpoint, monkeypatch, "hang:2:5", ranks=4, dp=2, timeout=6) as engine:
        work(engine)
        assert engine.wait(30) == 71
        assert engine.fatal is not None
        assert f"rank 2 on {HOST}" in engine.fatal.message
        assert gone(engine.ready.pids)


def test_a_rank_that_does_not_join_is_missed(checkpoint, monkeypatch):
    want = f"rank 0 on {HOST}: the ranks have not all joined within 3 s; is every node of the job up and reachable"
    with pytest.raises(AssertionError, match=re.escape(want)):
        faulty(checkpoint, monkeypatch, "join:1:0", timeout=3)


def test_an_exception_while_loading(checkpoint, monkeypatch):
    with pytest.raises(AssertionError, match=f"rank 1.*{HOST}.*ZeroDivisionError"):
        faulty(checkpoint, monkeypatch, "load:1:0")


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize(
    "fault, rank, phase, options",
    [
        ("load:1:1", 1, "loading weights (tests/rank/faulty.py: load)", {}),
        ("load:0:1", 0, "loading weights (tests/rank/faulty.py: load)", {}),
        ("stripe:1:0", 1, "loading weights (tests/rank/faulty.py: read)", {"load": "striped"}),
        ("start:1:1000", 1, "preparing steps", {}),
    ],
)
def test_a_rank_that_hangs_before_the_first_step_is_named(checkpoint, monkeypatch, fault, rank, phase, options):
    """The others wait for it in a collective: after a while in which nobody gets on, that is the end."""
    monkeypatch.setenv("PATIENCE", "4")
    with pytest.raises(AssertionError) as caught:
        faulty(checkpoint, monkeypatch, fault, timeout=3, **options)
    words = f"phalanx: no rank has got on with starting for 4 s; behind: rank {rank} on {HOST}, {phase}"
    assert str(caught.value).count(words) == 1, str(caught.value)
    assert "--timeout" in str(caught.value)


@pytest.mark.long
@pytest.mark.alone
def test_loading_may_take_long_as_long_as_it_gets_on(checkpoint, monkeypatch):
    """The timeout also holds for steps: a step of a busy machine took over 3 s."""
    monkeypatch.setenv("PATIENCE", "8")
    with faulty(checkpoint, monkeypatch, "slow:1:36", timeout=8) as engine:
        assert len(engine.generate({"one": ([5, 6], greedy(3))})["one"].tokens) == 3
        time.sleep(8.5)  # longer than the patience: once it has started, nothing has to move
        assert engine.drain() == 0


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_before_the_first_step(checkpoint, monkeypatch, rank):
    """Capturing fails as where CUDA graphs cannot be captured: the job is not ready before."""
    with pytest.raises(AssertionError, match=f"rank {rank}.*{HOST}.*ZeroDivisionError") as caught:
        faulty(checkpoint, monkeypatch, f"start:{rank}:0")
    assert "StopIteration" in str(caught.value)  # it said that it was ready


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_the_job_is_ready_when_every_step_thread_is(checkpoint, monkeypatch, rank):
    with faulty(checkpoint, monkeypatch, f"start:{rank}:1") as engine:
        assert not wait(lambda: "the step thread goes on" not in engine.log(), 5)  # it comes through mpirun
        assert len(engine.generate({"one": ([5, 6], greedy(3))})["one"].tokens) == 3


def test_what_fits_in_the_cache_and_what_does_not(checkpoint):
    """The log says what fits. The server checks lengths; a faulty one must not stop the job."""
    with Engine(checkpoint, 2, mem=2, max_model_len=100) as engine:
        assert not wait(lambda: f"cache: {engine.ready.kv_tokens} tokens" not in engine.log(), 5)
        assert "(--mem 2;" in engine.log()
        assert re.search(r" loaded \d+ MB.*\d s\n", engine.log())
        assert engine.ready.kv_tokens == 2 * 1024 * 1024 // (2 * 4 * 3 * 8 * 4) // 16 * 16
        outputs = engine.generate({"long": ([5] * 60, greedy(41)), "fine": ([5] * 60, greedy(40))})
        assert outputs["long"].finish == "error" and "most 100 fit" in outputs["long"].error
        assert len(outputs["fine"].tokens) == 40


@pytest.mark.long
def test_what_all_ranks_refuse_is_said_once(checkpoint):
    """A length that does not fit, with the numbers."""
    with pytest.raises(AssertionError, match="cache.*holds 1360.*--max-model-len") as caught:
        Engine(checkpoint, 2, mem=1, max_model_len=2000)
    assert "--kv-fraction, lower --max-model-len," in str(caught.value)
    assert str(caught.value).count("--max-model-len asks for") == 1


def alone(**job) -> subprocess.CompletedProcess:
    """`python -m phalanx.rank` as a lonely process. Open MPI does not remove such a one's files."""
    job = Job(options=Options(model="nowhere", **job.pop("options", {})), **job)
    command = [sys.executable, "-m", "phalanx.rank"]
    with tempfile.TemporaryDirectory() as place:
        environ = environment(**{JOB_ENV: encode_job(job), "TMPDIR": place, MEMORY: place})
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)


@pytest.mark.long
def test_a_lonely_rank_says_that_its_mpirun_is_not_its_mpi():
    """Ranks as under srun without PMI, or another MPI's mpirun; one of the ranks says it."""
    done = alone(announced_size=2, rank=0)
    assert done.returncode == 2
    assert "phalanx: started" in done.stderr
    assert "srun --mpi=pmix" in done.stderr and "MPI4PY_LIBMPI" in done.stderr
    other = alone(announced_size=2, rank=1)
    assert (other.returncode, other.stderr) == (2, "")


def test_a_log_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "phalanx-rank-0.log").mkdir()
    done = alone(options={"log": True})
    assert done.returncode == 2
    assert f"phalanx: --log: {tmp_path}/phalanx-rank-0.log cannot" in done.stderr


def test_a_server_that_is_not_there():
    done = alone(server_socket="/nowhere/link")
    assert done.returncode == 70
    assert "reached at /nowhere/link:" in done.stderr


def test_a_server_that_goes_away_ends_the_job(checkpoint):
    with Engine(checkpoint, 2) as engine:
        engine.socket.close()
        assert engine.process.wait(10) == 70
        assert f"{HOST}: the server process" in engine.log()
        assert gone(engine.ready.pids)


def test_a_gpu_that_pytorch_does_not_see(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rank = Rank(Job(options=Options(), device_index=1), None, [HOST], LocalWatchdog())
    with pytest.raises(errors.FatalError, match="GPU 1.*PyTorch") as caught:
        rank._device()
    assert caught.value.code == 2 and "--device cpu" in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is here")
def test_gpus_without_cupy():
    def one(comm):
        return NcclComm(comm)

    with pytest.raises(errors.FatalError, match="CuPy.*phalanx.gpu"):
        threads.run(one, 2)
