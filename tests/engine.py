"""A live job of ranks, spoken to over the front's socket: the engine without text and HTTP.

On a machine with GPUs its ranks run there, in f32, and have to do exactly what they do on CPUs.
"""

from __future__ import annotations

import functools
import os
import signal
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
from phalanx.launcher import hosts
from phalanx.rank import step
from phalanx.rank.options import JOB_ENV, Job, Options, encode_job

from .ranks import environment, mpirun


@functools.cache
def usual() -> str:
    """cuda where there are GPUs that PyTorch can use, else cpu."""
    if not hosts.gpus():
        return "cpu"
    import torch  # here: it takes seconds

    return "cuda" if torch.cuda.is_available() else "cpu"


def device(ranks: int, threads: bool = False) -> str:
    """Where a job's ranks run: on a GPU each, or on CPUs; TEST_DEVICE, cpu or cuda, chooses where it is set.

    Jobs of more ranks than GPUs run on CPUs: every test is worth its time on every machine, and fewer GPUs than four
    are the rule. Who asked for cuda wants to know what GPUs do, so that they are skipped then.
    """
    asked = os.environ.get("TEST_DEVICE")
    if (asked or usual()) == "cpu":
        return "cpu"
    if not threads and ranks <= hosts.gpus():
        return "cuda"
    if asked:
        pytest.skip("ranks as threads are for CPUs" if threads else f"needs {ranks} GPUs, there are {hosts.gpus()}")
    return "cpu"


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[step.TokenLogprob] = field(default_factory=list)
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
        program: tuple[str, ...] = ("-m", "phalanx.launcher.member"),
        wait: float = 0,
        **options,
    ):
        on = options.pop("device", "") or device(ranks, threads)
        wait = wait or (60 if on == "cpu" else 100)  # the first ranks on GPUs compile kernels
        self._directory = tempfile.TemporaryDirectory(prefix="phalanx-test-")
        path = f"{self._directory.name}/lead.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(1)
        timeout = 20.0 if on == "cpu" else 60.0
        options = {"max_num_seqs": 32, "mem": 64, "timeout": timeout, "device": on, "dtype": "f32", **options}
        chosen = Options(model=str(model), ranks=ranks, multithread=threads, **options)
        job = Job(options=chosen, announced_size=ranks, front_socket=path)
        command = [sys.executable, *program]
        if ranks > 1 and not threads:
            command = [mpirun(), "-np", str(ranks), "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE", *command]
        self.stderr = open(f"{self._directory.name}/stderr", "w+")  # noqa: SIM115, closed in close()
        self.process = subprocess.Popen(
            command, env=environment(**{JOB_ENV: encode_job(job)}), stderr=self.stderr, start_new_session=True
        )
        self._frames = step.Frames(step.ToFront)
        self._pending: list[step.ToFront] = []
        self.stats = step.Stats()
        self.fatal: step.Fatal | None = None
        try:
            self.socket = self._accept(listener, wait)
            self.socket.settimeout(wait)
            self.ready = next(m for m in self.messages() if isinstance(m, step.Ready))
        except BaseException as error:
            time.sleep(0.5)  # the last words are on their way
            log = self.log()
            self.kill()
            raise AssertionError(f"the ranks did not come up: {error!r}\n{log}") from error

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

    def messages(self) -> Iterable[step.ToFront]:
        """What the lead says, until it hangs up."""
        while True:
            while self._pending:
                yield self._pending.pop(0)
            data = self.socket.recv(1 << 16)
            if not data:
                return
            self._pending = self._frames.feed(data)

    def send(self, *messages: step.ToLead) -> None:
        self.socket.sendall(b"".join(step.frame(m) for m in messages))

    def generate(self, requests: dict[str, tuple[list[int], step.Sampling]]) -> dict[str, Output]:
        """Submit all at once; every sequence's output when all have ended."""
        self.send(*(step.Request(name, step.pack_u32(tokens), s) for name, (tokens, s) in requests.items()))
        return self.collect(requests)

    def collect(self, names: Iterable[str]) -> dict[str, Output]:
        outputs = {name: Output() for name in names}
        for message in self.messages():
            if isinstance(message, step.Fatal):
                self.fatal = message
            if not isinstance(message, step.Deltas):
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
        raise AssertionError(f"the lead hung up; fatal: {self.fatal}\n{self.log()}")

    def rest(self) -> step.Stats:
        """The engine's figures once it is idle."""
        for message in self.messages():
            if isinstance(message, step.Deltas) and message.stats:
                self.stats = message.stats
                if not message.stats.running and not message.stats.waiting:
                    return self.stats
        raise AssertionError(f"the lead hung up\n{self.log()}")

    def drain(self, timeout: float = 15) -> int:
        """Ask the job to end in order; its exit code."""
        self.send(step.Drain())
        for message in self.messages():
            self.stats = getattr(message, "stats", None) or self.stats
        return self.process.wait(timeout)

    def wait(self, timeout: float) -> int:
        """The exit code of a job that is expected to end, with its last words in `fatal`."""
        self.socket.settimeout(timeout)
        for message in self.messages():
            if isinstance(message, step.Fatal):
                self.fatal = message
        return self.process.wait(timeout)

    def kill(self) -> None:
        """End everything that is left; nothing may outlive a test."""
        pids = self.ready.pids if hasattr(self, "ready") else []
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pid in pids:
            for _ in range(50):
                if not _is_rank(pid):
                    break
                os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
        if hasattr(self, "socket"):
            self.socket.close()
        self.stderr.close()
        self._directory.cleanup()


def _is_rank(pid: int) -> bool:
    line = Path(f"/proc/{pid}/cmdline")
    return line.exists() and b"phalanx" in line.read_bytes()


def greedy(count: int, **more) -> step.Sampling:
    return step.Sampling(max_tokens=count, temperature=0.0, **more)
