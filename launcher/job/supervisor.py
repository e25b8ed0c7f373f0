"""Runs a job from outside MPI: starts its ranks, passes signals on, restarts them, and leaves nothing behind.

One thread and one loop: children that ask to die with their parent die with the thread that started them.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO

import msgspec

from ... import errors
from ...rank.options import JOB_ENV, Job, Options, encode_job
from . import linux, mpi_env, mpirun, rank_bootstrap
from .linux import say
from .output_filter import OutputFilter

BOOTSTRAP = ["-m", "phalanx.launcher.job.rank_bootstrap"]
TERM_PATIENCE = 2.0  # seconds between asking and killing
SERVER_PATIENCE = 2.5
PEER_PATIENCE = 4.0  # seconds between the front's end and mpirun's
RESTART_DELAY = 1.0
DRAIN_REPEAT = 1.0  # for who starts without saying when it can hear SIGUSR1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
NAMES = {
    errors.ERROR: "an error",
    errors.USAGE: "a wrong option",
    errors.MODEL: "the model cannot be read",
    errors.MEMORY: "not enough memory",
    errors.RANK_FAILED: "a rank failed",
    errors.RANK_STUCK: "a rank was stuck",
    errors.RANK_KILLED: "a rank or mpirun was killed",
    errors.UNFINISHED: "unfinished, to be started again",
    errors.STOPPED: "stopped",
}
RESTARTABLE = (errors.ERROR, errors.RANK_FAILED, errors.RANK_STUCK, errors.RANK_KILLED)


class LaunchSpec(msgspec.Struct):
    """How the ranks are started, as often as needed."""

    command: list[str]
    environ: dict[str, str]
    through_mpirun: bool
    mpich: bool = False


def launch_spec(options: Options, link: str, columns: int = 0) -> LaunchSpec:
    """One rank, or ranks that are threads, need no mpirun. columns: of the terminal that their bars may use."""
    single = options.multithread or options.ranks == 1
    job = Job(
        options=rank_bootstrap.without_key(options),
        announced_size=1 if single else options.ranks,
        server_socket=link,
        columns=columns,
    )
    environ = dict(os.environ) | {JOB_ENV: encode_job(job)}
    environ.pop(rank_bootstrap.KEY_ENV, None)
    program = [sys.executable, *BOOTSTRAP]
    if single:
        # The variables of an allocation's shell would make the member believe that it is one of several.
        return LaunchSpec(program, mpi_env.without_mpi(environ), False)
    mpi = mpirun.find(os.environ)
    environ = mpi_env.for_mpirun(environ)
    environ |= mpirun.environment(mpi, options.ranks, environ) | {rank_bootstrap.PARENT_ENV: str(os.getpid())}
    return LaunchSpec(mpirun.command(mpi, options.ranks, program), environ, True, mpi.kind == "mpich")


class Supervisor:
    """One job. `front` is its front where the supervisor has one, `parent` a process with which it ends."""

    def __init__(
        self,
        start: LaunchSpec,
        front: subprocess.Popen[bytes] | None = None,
        restarts: int = 0,
        parent: int = 0,
        serving: Callable[[], bool] = lambda: True,
    ):
        self._start = start
        self._front = front
        self._restarts = restarts
        self._serving = serving
        self._ranks: subprocess.Popen[bytes] | None = None
        self._code: int | None = None  # decided: what run() returns once all is cleared
        self._draining = self._stopping = False
        self._deadline = float("inf")  # of what is under way: the end of patience, a restart, another drain
        self._at_deadline: Callable[[], None] = lambda: None
        self._noise = OutputFilter()
        self._selector = selectors.DefaultSelector()
        if parent:
            self._watch_process(parent, self._parent_gone)
        if front is not None:
            self._watch_process(front.pid, self._front_gone)
            self._copy(front.stdout, 2)

    def run(self) -> int:
        """Blocks until the job is over and cleared away; returns its exit code."""
        linux.adopt_orphans()
        wakeup, wake = socket.socketpair()
        wakeup.setblocking(False)
        wake.setblocking(False)
        old_fd = signal.set_wakeup_fd(wake.fileno())
        old = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self._selector.register(wakeup, selectors.EVENT_READ, lambda _: self._signals(wakeup.recv(64)))
        try:
            self._start_ranks()
            while self._code is None:
                self._turn()
            return self._code
        finally:
            self._clear()
            signal.set_wakeup_fd(old_fd)
            for number, handler in old.items():
                signal.signal(number, handler)
            wakeup.close()
            wake.close()
            self._selector.close()

    def _turn(self) -> None:
        left = self._deadline - time.monotonic()
        events = self._selector.select(None if left == float("inf") else max(0.0, left))
        for key, _ in events:
            now = self._selector.get_map().get(key.fd)
            if now is not None and now.data is key.data:  # not gone by what came before it in this turn
                key.data(key.fileobj)
            if self._code is not None:
                return  # what else has ended follows from that
        if time.monotonic() >= self._deadline:
            self._deadline = float("inf")
            self._at_deadline()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._deadline, self._at_deadline = time.monotonic() + seconds, action

    # Children and their output.

    def _start_ranks(self) -> None:
        self._noise = OutputFilter()
        self._ranks = subprocess.Popen(
            self._start.command,
            env=self._start.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C on the terminal is for us to pass on
            preexec_fn=linux.tie_to_parent(),
        )
        self._watch_process(self._ranks.pid, self._ranks_gone)
        noise = self._noise if self._start.through_mpirun else None
        self._copy(self._ranks.stdout, 1, noise if self._start.mpich else None)  # which is where hydra speaks
        self._copy(self._ranks.stderr, 2, None if self._start.mpich else noise)

    def _watch_process(self, pid: int, gone: Callable[[], None]) -> None:
        fd = linux.pidfd(pid)

        def ended(_: object) -> None:
            self._selector.unregister(fd)
            os.close(fd)
            gone()

        self._selector.register(fd, selectors.EVENT_READ, ended)

    def _copy(self, stream: IO[bytes] | None, to: int, noise: OutputFilter | None = None) -> None:
        assert stream is not None
        fd = stream.fileno()

        def copy(_: object) -> None:
            data = os.read(fd, 65536)
            if not data:
                self._selector.unregister(stream)
                stream.close()
            shown = data if noise is None else noise.feed(data) if data else noise.flush()
            linux.write(to, shown)

        self._selector.register(stream, selectors.EVENT_READ, copy)

    # What can happen.

    def _signals(self, numbers: bytes) -> None:
        for number in numbers:
            if self._draining:
                if number != signal.SIGUSR1:
                    self._stop(errors.STOPPED)
            elif self._ranks is None or not self._serving():
                say("ending: no request was accepted yet")
                self._stop(errors.OK)
            else:
                self._drain(number)

    def _drain(self, number: int) -> None:
        self._draining = True
        again = "Ctrl-C again" if number == signal.SIGINT else "SIGTERM"
        say(f"draining: open requests are finished, new ones refused; {again} stops at once")
        self._send_drain()

    def _send_drain(self) -> None:
        if self._front is not None and self._front.poll() is None:
            self._front.send_signal(signal.SIGUSR1)
        if self._ranks is not None and self._ranks.poll() is None:
            self._ranks.send_signal(signal.SIGUSR1)  # once is enough: it is held back until the rank can drain

    def _stop(self, code: int) -> None:
        """End the ranks whatever they do; `code` is what the job then ends with."""
        if self._stopping:
            return
        self._stopping = True
        if self._ranks is None:
            self._code = code
            return
        self._stop_code = code
        self._ranks.send_signal(signal.SIGTERM)
        self._after(TERM_PATIENCE, self._kill_ranks)

    def _kill_ranks(self) -> None:
        if self._ranks is not None:
            linux.kill_group(self._ranks.pid, signal.SIGKILL)

    def _parent_gone(self) -> None:
        self._stop(errors.STOPPED)

    def _front_gone(self) -> None:
        assert self._front is not None
        code = self._front.wait()
        if self._draining or self._stopping or code == errors.OK:  # it drains by itself where --idle-exit says so
            return  # the ranks decide
        if self._ranks is None:
            self._code = errors.RANK_FAILED
        elif code in (errors.USAGE, errors.MODEL):
            self._stop(code)  # it has said what is wrong
        else:
            # It ends when rank 0 is gone, and rank 0 when it is gone: whichever came first, mpirun has the word.
            if code < 0:
                say(f"the front was killed by signal {-code}")
            self._after(PEER_PATIENCE, lambda: self._stop(errors.RANK_FAILED))

    def _ranks_gone(self) -> None:
        assert self._ranks is not None
        code = exit_code(self._ranks.wait(), self._start.mpich)
        self._drain_pipes()
        self._clear_ranks()
        self._ranks = None
        self._deadline = float("inf")
        if self._stopping:
            self._code = self._stop_code
        elif code == errors.OK or self._draining:
            self._code = code
        elif code in RESTARTABLE and self._restarts > 0 and (self._front is None or self._front.poll() is None):
            self._restarts -= 1
            self._say_end(code)
            say(f"starting the ranks again ({self._restarts} restarts left)")
            self._after(RESTART_DELAY, self._start_ranks)
        else:
            self._say_end(code)
            self._code = code

    def _say_end(self, code: int) -> None:
        why = f" ({self._noise.casualty})" if self._noise.casualty else ""
        say(f"the job ended with exit code {code}: {NAMES.get(code, 'see above')}{why}")

    # The end.

    def _drain_pipes(self) -> None:
        """What the ranks wrote last; their pipes are read until nothing comes."""
        assert self._ranks is not None
        pipes = [self._ranks.stdout, self._ranks.stderr]
        deadline = time.monotonic() + 0.5  # who still holds them is cleared away next
        while time.monotonic() < deadline:
            ready = [key for key, _ in self._selector.select(0.05) if key.fileobj in pipes]
            if not ready:
                break
            for key in ready:
                key.data(key.fileobj)

    def _clear_ranks(self) -> None:
        """Kill what is left of the ranks: descendants that mpirun did not end are our children now."""
        assert self._ranks is not None
        linux.kill_group(self._ranks.pid, signal.SIGKILL)
        spared = {self._front.pid} if self._front is not None else set()
        linux.reap(spared)
        for stream in (self._ranks.stdout, self._ranks.stderr):
            if stream is not None and not stream.closed:
                self._selector.unregister(stream)
                stream.close()

    def _clear(self) -> None:
        if self._ranks is not None:
            linux.kill_group(self._ranks.pid, signal.SIGKILL)
            self._ranks.wait()
            self._clear_ranks()
        if self._front is not None:
            with contextlib.suppress(ProcessLookupError):
                self._front.terminate()
            self._read_front()
            try:
                self._front.wait(SERVER_PATIENCE)
            except subprocess.TimeoutExpired:
                linux.kill_group(self._front.pid, signal.SIGKILL)
                self._front.wait()
        linux.reap(set())

    def _read_front(self) -> None:
        """The front's last words, until it closes its output or its time is over."""
        assert self._front is not None and self._front.stdout is not None
        deadline = time.monotonic() + SERVER_PATIENCE
        stream = self._front.stdout
        while not stream.closed and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is stream:
                    key.data(stream)
                elif isinstance(key.fileobj, socket.socket):
                    key.fileobj.recv(64)
                else:
                    self._selector.unregister(key.fileobj)


class SupervisorRequest(msgspec.Struct):
    """What a process that hosts the front itself, the library, asks of a supervisor that it starts."""

    options: Options
    link: str
    parent: int


REQUEST_ENV = "PHALANX_ORDER"


def main() -> int:
    """`python -m phalanx.launcher.job.supervisor`: a job without a front that ends with the process that ordered it."""
    order = msgspec.json.decode(os.environ.pop(REQUEST_ENV), type=SupervisorRequest)
    try:
        if os.getppid() != order.parent:
            return errors.STOPPED
        return Supervisor(launch_spec(order.options, order.link), parent=order.parent).run()
    except errors.FatalError as stop:
        say(str(stop))
        return stop.code
    finally:
        if os.getppid() != order.parent:  # it was killed and could not clear up
            shutil.rmtree(os.path.dirname(order.link), ignore_errors=True)


def exit_code(code: int, mpich: bool = False) -> int:
    """Popen's code of mpirun or the rank as one of errors.py."""
    if code < 0 or code > 128:
        return errors.RANK_KILLED if code != errors.STOPPED else code
    if mpich and code in (6, 7, 8, 9, 11, 15):
        return errors.RANK_KILLED  # hydra ends with the signal's number
    return code if code in NAMES or code == errors.OK else errors.ERROR


if __name__ == "__main__":
    sys.exit(main())
