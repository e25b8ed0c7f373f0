"""A live job of ranks, spoken to over the server's socket: the engine without text and HTTP.

On a machine with GPUs its ranks run there, in f32, and have to do exactly what they do on CPUs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from phalanx.launcher.job import mpi_env
from phalanx.rank import protocol
from phalanx.rank.options import JOB_ENV, Job, Options, encode_job

from .processes import Started
from .ranks import environment, under_mpirun


@functools.cache
def usual() -> str:
    """cuda where there are GPUs that PyTorch can use, else cpu."""
    if not mpi_env.gpus():
        return "cpu"
    import torch  # here: it takes seconds

    return "cuda" if torch.cuda.is_available() else "cpu"


def device(ranks: int, threads: bool = False) -> str:
    """The device of a job's ranks: on a GPU each, or on CPUs; TEST_DEVICE, cpu or cuda, chooses where it is set.

    Jobs of more ranks than GPUs run on CPUs: every test is worth its time on every machine, and fewer GPUs than four
    are the rule. Who asked for cuda wants to know what GPUs do, so that they are skipped then.
    """
    asked = os.environ.get("TEST_DEVICE")
    if (asked or usual()) == "cpu":
        return "cpu"
    if not threads and ranks <= mpi_env.gpus():
        return "cuda"
    if asked:
        pytest.skip("ranks as threads are for CPUs" if threads else f"needs {ranks} GPUs, there are {mpi_env.gpus()}")
    return "cpu"


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[protocol.TokenLogprob] = field(default_factory=list)
    finish: str = ""
    cached: int = 0
    error: str = ""
    embedding: array[float] = field(default_factory=lambda: array("f"))


class Engine:
    """Ranks of `model`, under mpirun unless there is one or threads=True. Use it as a context manager."""

    def __init__(
        self,
        model: Path | str,
        ranks: int = 1,
        threads: bool = False,
        program: tuple[str, ...] = ("-m", "phalanx.launcher.job.rank_bootstrap"),
        wait: float = 0,
        **options,
    ):
        on = options.pop("device", "") or device(ranks, threads)
        wait = wait or 120  # the first ranks on GPUs compile kernels; four on two cores that others use start slowly
        self._directory = tempfile.TemporaryDirectory(prefix="phalanx-test-")
        path = f"{self._directory.name}/link.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(1)
        timeout = 60.0  # of a step, on a machine that others use too
        options = {"max_num_seqs": 32, "mem": 64, "timeout": timeout, "device": on, "dtype": "f32", **options}
        chosen = Options(model=str(model), ranks=ranks, multithread=threads, **options)
        job = Job(options=chosen, announced_size=ranks, server_socket=path)
        command = [sys.executable, *program]
        if ranks > 1 and not threads:
            command = [*under_mpirun(ranks), *command]
        self.stderr = open(f"{self._directory.name}/stderr", "w+")  # noqa: SIM115, closed in close()
        self.process = subprocess.Popen(
            command, env=environment(**{JOB_ENV: encode_job(job)}), stderr=self.stderr, start_new_session=True
        )
        self.started = Started(self.process.pid)
        self._frames = protocol.Frames(protocol.ToServer)
        self._pending: list[protocol.ToServer] = []
        self.stats = protocol.Stats()
        self.fatal: protocol.Fatal | None = None
        try:
            self.socket = self._accept(listener, wait)
            self.socket.settimeout(wait)
            self.ready = next(m for m in self.messages() if isinstance(m, protocol.Ready))
            self.started.look()
        except BaseException as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2)  # the last words are on their way
            log, code = self.log(), self.process.poll()
            self.kill()
            raise AssertionError(f"the ranks did not come up (exit code {code}): {error!r}\n{log}") from error

    def _accept(self, listener: socket.socket, wait: float) -> socket.socket:
        """Rank 0's connection; gives up when the ranks have ended."""
        listener.settimeout(0.5)
        until = time.monotonic() + wait
        while True:
            try:
                return listener.accept()[0]
            except TimeoutError:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def log(self) -> str:
        return Path(self.stderr.name).read_text()

    def messages(self) -> Iterable[protocol.ToServer]:
        """The scheduler's messages, until it hangs up."""
        while True:
            while self._pending:
                yield self._pending.pop(0)
            data = self.socket.recv(1 << 16)
            if not data:
                return
            self._pending = self._frames.feed(data)

    def send(self, *messages: protocol.ToScheduler) -> None:
        self.socket.sendall(b"".join(protocol.frame(m) for m in messages))

    def generate(self, requests: dict[str, tuple[list[int], protocol.SamplingParams]]) -> dict[str, Output]:
        """Submit all at once; every sequence's output when all have ended."""
        self.send(*(protocol.Request(name, protocol.pack_u32(tokens), s) for name, (tokens, s) in requests.items()))
        return self.collect(requests)

    def collect(self, names: Iterable[str]) -> dict[str, Output]:
        outputs = {name: Output() for name in names}
        for message in self.messages():
            if isinstance(message, protocol.Fatal):
                self.fatal = message
            if not isinstance(message, protocol.Deltas):
                continue
            self.stats = message.stats or self.stats
            for delta in message.deltas:
                if delta.id not in outputs:
                    continue
                output = outputs[delta.id]
                output.tokens += delta.tokens
                output.logprobs += delta.logprobs
                output.cached += delta.cached_tokens
                output.finish, output.error = delta.finish, delta.error
                output.embedding = array("f", delta.embedding)
            if all(o.finish for o in outputs.values()):
                return outputs
        raise AssertionError(f"the scheduler hung up; fatal: {self.fatal}\n{self.log()}")

    def rest(self) -> protocol.Stats:
        """The engine's figures once it is idle."""
        for message in self.messages():
            if isinstance(message, protocol.Deltas) and message.stats:
                self.stats = message.stats
                if not message.stats.running and not message.stats.waiting:
                    return self.stats
        raise AssertionError(f"the scheduler hung up\n{self.log()}")

    def drain(self, timeout: float = 60) -> int:
        """Ask the job to end in order; its exit code."""
        self.send(protocol.Drain())
        for message in self.messages():
            self.stats = getattr(message, "stats", None) or self.stats
        return self.process.wait(timeout)

    def wait(self, timeout: float) -> int:
        """The exit code of a job that is expected to end, with its last words in `fatal`."""
        self.socket.settimeout(timeout)
        for message in self.messages():
            if isinstance(message, protocol.Fatal):
                self.fatal = message
        return self.process.wait(timeout)

    def kill(self) -> None:
        """End everything that is left; nothing may outlive a test."""
        self.started.kill()
        self.process.wait()
        if hasattr(self, "socket"):
            self.socket.close()
        self.stderr.close()
        self._directory.cleanup()


def greedy(count: int, **more) -> protocol.SamplingParams:
    return protocol.SamplingParams(max_tokens=count, temperature=0.0, **more)
