"""The supervisor: starts a job's ranks from outside MPI, passes signals on, restarts them and cleans up.

It starts all children from one thread: those with a parent-death signal die with the thread that started them. It
reads their output at all times and hands it to the log's writers (logs.py), so no reader can stop a rank or mpirun.
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

from ... import child_python, errors, logs
from ...logs import say
from ...rank.options import JOB_ENV, Job, Options, encode_job
from ..options.resolve import rank_options
from . import linux, mpi_env, mpirun, rank_bootstrap, secret_variables
from .output_filter import OutputFilter

BOOTSTRAP = ["-m", "phalanx.launcher.job.rank_bootstrap"]
TERM_PATIENCE = 2.0  # seconds between SIGTERM and SIGKILL
SERVER_PATIENCE = 2.5  # seconds for the server process to end
PEER_PATIENCE = 4.0  # seconds that mpirun may outlive the server process
KILLED_PATIENCE = 0.25  # seconds in which a server process that was killed has ended
RESTART_DELAY = 1.0  # seconds
DRAIN_REPEAT = 1.0  # seconds between SIGUSR1s to a process that may not handle them yet
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
    """How to start the ranks, at first and at each restart."""

    command: list[str]
    environ: dict[str, str]
    through_mpirun: bool
    mpich: bool = False


def launch_spec(options: Options, link: str, columns: int = 0, watched: bool = True) -> LaunchSpec:
    """The LaunchSpec of a job. One rank, or ranks that are threads, need no mpirun.

    columns: the terminal's width. watched: the process at the link and rank 0 exchange heartbeats.
    """
    single = options.multithread or options.ranks == 1
    job = Job(
        options=rank_options(options),
        announced_size=1 if single else options.ranks,
        server_socket=link,
        server_watched=watched,
        columns=columns,
    )
    environ = secret_variables.without(os.environ) | {JOB_ENV: encode_job(job)}
    program = child_python.command(*BOOTSTRAP)
    if single:
        # With the variables of an allocation's shell the rank would take itself for one of several.
        return LaunchSpec(program, mpi_env.without_mpi(environ), False)
    mpi = mpirun.find(os.environ)
    environ = mpi_env.for_mpirun(environ)
    environ |= mpirun.environment(mpi, options.ranks, environ) | {rank_bootstrap.PARENT_ENV: str(os.getpid())}
    return LaunchSpec(mpirun.command(mpi, options.ranks, program), environ, True, mpi.kind == "mpich")


class Supervisor:
    """Runs one job. server: its server process, if it has one here. parent: a process whose end ends the job."""

    def __init__(
        self,
        start: LaunchSpec,
        server: subprocess.Popen[bytes] | None = None,
        restarts: int = 0,
        parent: int = 0,
        serving: Callable[[], bool] = lambda: True,
    ):
        self._start = start
        self._server = server
        self._restarts = restarts
        self._serving = serving
        self._ranks: subprocess.Popen[bytes] | None = None
        self._code: int | None = None  # set when the job is over: what run() returns after cleaning up
        self._draining = self._stopping = False
        self._deadline = float("inf")  # when _at_deadline is due: a kill, a restart, another drain
        self._at_deadline: Callable[[], None] = lambda: None
        self._filter = OutputFilter()
        self._selector = selectors.DefaultSelector()
        if parent:
            self._watch_process(parent, self._parent_ended)
        if server is not None:
            self._watch_process(server.pid, self._server_ended)
            self._copy(server.stdout, 2)

    def run(self) -> int:
        """Run the job to its end and clean up. Returns its exit code."""
        logs.unblock()
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
                self._run_once()
            return self._code
        finally:
            self._clear()
            signal.set_wakeup_fd(old_fd)
            for number, handler in old.items():
                signal.signal(number, handler)
            wakeup.close()
            wake.close()
            self._selector.close()
            logs.flush()

    def _run_once(self) -> None:
        left = self._deadline - time.monotonic()
        events = self._selector.select(None if left == float("inf") else max(0.0, left))
        for key, _ in events:
            now = self._selector.get_map().get(key.fd)
            if now is not None and now.data is key.data:  # an earlier event of this round may have unregistered it
                key.data(key.fileobj)
            if self._code is not None:
                return  # other processes end because of that
        if time.monotonic() >= self._deadline:
            self._deadline = float("inf")
            self._at_deadline()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._deadline, self._at_deadline = time.monotonic() + seconds, action

    # Children and their output.

    def _start_ranks(self) -> None:
        self._filter = OutputFilter()
        self._ranks = subprocess.Popen(
            self._start.command,
            env=self._start.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # so that Ctrl-C reaches the supervisor only
            preexec_fn=linux.tie_to_parent(),
        )
        self._watch_process(self._ranks.pid, self._ranks_ended)
        output_filter = self._filter if self._start.through_mpirun else None
        self._copy(
            self._ranks.stdout, 1, output_filter if self._start.mpich else None
        )  # hydra writes its messages there
        self._copy(self._ranks.stderr, 2, None if self._start.mpich else output_filter)

    def _watch_process(self, pid: int, gone: Callable[[], None]) -> None:
        fd = linux.pidfd(pid)

        def ended(_: object) -> None:
            self._selector.unregister(fd)
            os.close(fd)
            gone()

        self._selector.register(fd, selectors.EVENT_READ, ended)

    def _copy(self, stream: IO[bytes] | None, to: int, output_filter: OutputFilter | None = None) -> None:
        assert stream is not None
        fd = stream.fileno()

        def copy(_: object) -> None:
            data = os.read(fd, 65536)
            if not data:
                self._selector.unregister(stream)
                stream.close()
            shown = data if output_filter is None else output_filter.feed(data) if data else output_filter.flush()
            logs.writer(to).write(shown)

        self._selector.register(stream, selectors.EVENT_READ, copy)

    # Events of a job.

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
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGUSR1)
        if self._ranks is not None and self._ranks.poll() is None:
            self._ranks.send_signal(signal.SIGUSR1)  # once is enough: the signal stays blocked until the rank can drain

    def _stop(self, code: int) -> None:
        """End the ranks at once. code: the job's exit code."""
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

    def _parent_ended(self) -> None:
        self._stop(errors.STOPPED)

    def _server_ended(self) -> None:
        assert self._server is not None
        code = self._server.wait()
        if self._draining or self._stopping or code == errors.OK:  # OK: --idle-exit makes it drain by itself
            return  # the ranks' exit code counts
        if self._ranks is None:
            self._code = errors.RANK_FAILED
        elif code in (errors.USAGE, errors.MODEL):
            self._stop(code)  # it has printed what is wrong
        else:
            # Rank 0 and the server process end when the other is gone. Whichever was first, mpirun's exit code counts.
            self._say_if_killed(code)
            self._after(PEER_PATIENCE, lambda: self._stop(errors.RANK_FAILED))

    def _say_if_killed(self, code: int) -> None:
        if code < 0:
            say(f"the server process was killed by signal {-code}", "error")

    def _await_killed_server(self) -> None:
        """Name a killed server process. Its sockets close before it has ended, so rank 0 may be gone first."""
        if self._server is None or self._server.returncode is not None:
            return  # there is none, or _server_ended has named it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._say_if_killed(self._server.wait(KILLED_PATIENCE))

    def _ranks_ended(self) -> None:
        assert self._ranks is not None
        code = exit_code(self._ranks.wait(), self._start.mpich)
        self._drain_pipes()
        self._clear_ranks()
        self._ranks = None
        self._deadline = float("inf")
        if code == errors.RANK_FAILED and not self._stopping:
            self._await_killed_server()
        if self._stopping:
            self._code = self._stop_code
        elif code == errors.OK or self._draining:
            self._code = code
        elif code in RESTARTABLE and self._restarts > 0 and (self._server is None or self._server.poll() is None):
            self._restarts -= 1
            self._announce_end(code)
            say(f"starting the ranks again ({self._restarts} restarts left)")
            self._after(RESTART_DELAY, self._start_ranks)
        else:
            self._announce_end(code)
            self._code = code

    def _announce_end(self, code: int) -> None:
        why = f" ({self._filter.casualty})" if self._filter.casualty else ""
        say(f"the job ended with exit code {code}: {NAMES.get(code, 'see above')}{why}", "error")

    # The end.

    def _drain_pipes(self) -> None:
        """Copy the ranks' last output: read their pipes until nothing comes."""
        assert self._ranks is not None
        pipes = [self._ranks.stdout, self._ranks.stderr]
        deadline = time.monotonic() + 0.5  # processes that still hold them are killed next
        while time.monotonic() < deadline:
            ready = [key for key, _ in self._selector.select(0.05) if key.fileobj in pipes]
            if not ready:
                break
            for key in ready:
                key.data(key.fileobj)

    def _clear_ranks(self) -> None:
        """Kill what is left of the ranks. Descendants that mpirun did not end are children of this process now."""
        assert self._ranks is not None
        linux.kill_group(self._ranks.pid, signal.SIGKILL)
        spared = {self._server.pid} if self._server is not None else set()
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
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                self._server.terminate()
            self._read_server()
            try:
                self._server.wait(SERVER_PATIENCE)
            except subprocess.TimeoutExpired:
                linux.kill_group(self._server.pid, signal.SIGKILL)
                self._server.wait()
        linux.reap(set())

    def _read_server(self) -> None:
        """Copy the server's last output until it closes the pipe or SERVER_PATIENCE is over."""
        assert self._server is not None and self._server.stdout is not None
        deadline = time.monotonic() + SERVER_PATIENCE
        stream = self._server.stdout
        while not stream.closed and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is stream:
                    key.data(stream)
                elif isinstance(key.fileobj, socket.socket):
                    key.fileobj.recv(64)
                else:
                    self._selector.unregister(key.fileobj)


class SupervisorRequest(msgspec.Struct):
    """The library's request to a supervisor that it starts. The library has the server in its own process."""

    options: Options
    link: str
    parent: int


REQUEST_ENV = "PHALANX_SUPERVISOR_REQUEST"


def main() -> int:
    """`python -m phalanx.launcher.job.supervisor`: a job without a server process, which ends with its parent."""
    request = msgspec.json.decode(os.environ.pop(REQUEST_ENV), type=SupervisorRequest)
    try:
        if os.getppid() != request.parent:
            return errors.STOPPED
        # The user's program has the server's place: it may stop, or compute for long without its event loop.
        start = launch_spec(request.options, request.link, watched=False)
        return Supervisor(start, parent=request.parent).run()
    except errors.FatalError as stop:
        say(str(stop), "error")
        return stop.code
    finally:
        if os.getppid() != request.parent:  # the parent was killed and could not clean up
            shutil.rmtree(os.path.dirname(request.link), ignore_errors=True)


def exit_code(code: int, mpich: bool = False) -> int:
    """Map Popen's return code of mpirun or a rank to a code of errors.py."""
    if code < 0 or code > 128:
        return errors.RANK_KILLED if code != errors.STOPPED else code
    if mpich and code in (6, 7, 8, 9, 11, 15):
        return errors.RANK_KILLED  # hydra ends with the signal's number
    return code if code in NAMES or code == errors.OK else errors.ERROR


if __name__ == "__main__":
    sys.exit(main())
