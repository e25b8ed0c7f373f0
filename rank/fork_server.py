"""Fork servers: processes that read something once, and fork workers for work that is not trusted.

Such work may compute for ever, fill the memory or crash a library, and that must cost its worker and nothing else. A
worker is forked within milliseconds and shares what was read.

`ForkServer` starts the process `python -m MODULE`, whose main program calls `serve`. Each packet of ForkServer names a
worker by a number. One with descriptors has that worker forked, which gets them, a socket first; one without ends it. A
worker that cannot be forked shows by its socket, which is closed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from .. import child_python, errors, linux_calls

log = logging.getLogger(__name__)
PACKET = 1 << 16  # bytes at most of a packet
LONGEST_ERROR = 2000  # characters of why the settings cannot be read
GATHER = 0.02  # seconds: a traceback comes in many writes
OUTPUT = 1 << 13  # bytes that are logged as one
Work = Callable[[socket.socket, Sequence[int]], object]  # of a worker, with its socket and other descriptors
Answer = tuple[int | None, str]  # an exit code, None: there is no such worker; and why the settings cannot be read


class ForkServer:
    """Starts the process, has workers forked, and ends them. One thread at a time uses it, `kill` excepted."""

    def __init__(self, module: str, settings: bytes, name: str):
        """settings: what `serve` hands to `load`. name: how the log calls the process."""
        self.control: socket.socket | None = None
        self._module, self._settings, self._name = module, settings, name
        self._process: subprocess.Popen[bytes] | None = None
        self._forked = 0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> socket.socket:
        """Start the process, again where it runs. The first answer confirms the settings, or gives the error.

        Returns the control socket. Raises OSError.
        """
        self.stop()
        file = linux_calls.memory_file(self._name)
        ours, theirs = socket.socketpair(socket.AF_UNIX, linux_calls.PACKETS)
        with theirs, open(file, "wb") as settings:
            settings.write(self._settings)
            settings.flush()
            fds = theirs.fileno(), file
            try:
                self._process = subprocess.Popen(
                    child_python.command("-m", self._module, *map(str, fds)),
                    # Without Phalanx's options and keys. Threads of tokenizers would not survive a fork.
                    env={name: value for name, value in os.environ.items() if not name.startswith("PHALANX_")}
                    | {"TOKENIZERS_PARALLELISM": "false"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=fds,
                )
            except BaseException:
                ours.close()
                raise
        self.control = ours
        # The thread does not have this object: once it is garbage, its socket is closed and the process ends.
        threading.Thread(target=_log, args=(self._process.stdout, self._name), daemon=True).start()
        return ours

    def fork(self, files: Sequence[int] = ()) -> tuple[int, socket.socket]:
        """Have a worker forked that gets copies of these descriptors; its number, and the socket to it.

        Raises OSError where the process has ended.
        """
        if self.control is None:
            raise BrokenPipeError("the process is not running")
        self._forked += 1
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control, [b"%d" % self._forked], [theirs.fileno(), *files])
            except OSError:
                ours.close()
                raise
        return self._forked, ours

    def end(self, worker: int) -> None:
        """Have a worker killed, if it has not ended. The next answer has its exit code. Raises OSError."""
        if self.control is not None:
            self.control.send(b"%d" % worker)

    def answer(self) -> Answer | None:
        """The next answer; None: the process has ended. Raises OSError where none has come in time."""
        if self.control is None:
            return None
        try:
            data = self.control.recv(PACKET)
        except ConnectionResetError:
            return None
        if not data:
            return None
        code, why = json.loads(data)
        return code, why

    def kill(self) -> None:
        """End the process and its workers at once. Any thread may call it."""
        if (process := self._process) is not None:
            process.kill()

    def stop(self, seconds: float = 0.0) -> int:
        """End the process and its workers; its exit code. seconds: how long it may take to end by itself."""
        if self.control is not None:
            self.control.close()
            self.control = None
        process, self._process = self._process, None
        if process is None:
            return 0
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _log(output: IO[bytes], name: str) -> None:
    """Log what a process and its workers print, which clients may cause: cut, and no more than a log takes."""
    with output:
        waiting = select.poll()
        waiting.register(output, select.POLLIN)
        while waiting.poll():
            time.sleep(GATHER)
            if not (data := os.read(output.fileno(), OUTPUT)):
                return
            log.warning("%s: %s", name, data.decode(errors="replace").strip())


def serve(load: Callable[[bytes], Work]) -> None:
    """Be the process. `load` reads the settings and returns what a worker does."""
    control, file = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    # A terminal and a batch system signal all processes of a job. These end with the one that started them: requests
    # would be blamed for workers that are gone before it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    linux_calls.end_with_parent(signal.SIGKILL)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what clients send may crash a library, as often as they like
    gc.disable()  # it would look at half a million tokens and merges again and again
    try:
        os.lseek(file, 0, os.SEEK_SET)
        with open(file, "rb") as settings:
            work = load(settings.read())
    except BaseException as error:  # whatever a damaged file makes the libraries raise, panics of Rust too
        known = isinstance(error, OSError | ValueError | errors.FatalError) and str(error)
        why = str(error) if known else f"{type(error).__name__}: {error}"
        _answer(control, error.code if isinstance(error, errors.FatalError) else 0, why[:LONGEST_ERROR])
        return
    # The thread that started this may end; its process's end closes the socket.
    linux_calls.end_with_parent(0)
    gc.collect()
    gc.freeze()  # forks share what nobody writes to
    gc.enable()
    _answer(control, 0)
    workers: dict[int, int] = {}  # process ids
    while True:
        data, files, _, _ = socket.recv_fds(control, PACKET, 2)
        if not data:
            return
        if not files:
            pid = workers.pop(int(data), None)
            _answer(control, None if pid is None else _end(pid))
            continue
        with contextlib.suppress(OSError):  # no memory or process is left
            workers[int(data)] = _fork(control, work, files)
        for one in files:
            os.close(one)


def _answer(control: socket.socket, code: int | None, why: str = "") -> None:
    control.send(json.dumps((code, why)).encode())


def _fork(control: socket.socket, work: Work, files: Sequence[int]) -> int:
    if pid := os.fork():
        return pid
    code = errors.ERROR
    try:
        control.close()
        linux_calls.end_with_parent(signal.SIGKILL)
        with contextlib.suppress(OSError):  # a container may have it read-only
            # First to go where the machine runs out of memory: a worker is replaced at once.
            Path("/proc/self/oom_score_adj").write_text("1000")
        work(socket.socket(fileno=files[0]), files[1:])
        code = errors.OK
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _end(pid: int) -> int:
    """A worker's exit code; it is killed, unless it has ended."""
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def limit_memory(more: int) -> None:
    """Have allocations fail beyond so many bytes more than this process has, or at the user's `ulimit -d`.

    Not RLIMIT_AS, which counts addresses: threads reserve many that they never use. Macs keep to neither.
    """
    if not linux_calls.LINUX:
        return
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    size = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_DATA, (size if most == resource.RLIM_INFINITY else min(size, most), most))
