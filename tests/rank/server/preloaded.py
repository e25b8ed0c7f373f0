"""Starts fork servers of tests by a fork of a process that has imported them: a fresh Python takes a quarter of a
second of CPU, hundreds of times.

`Preloaded` stands for the module `subprocess` in phalanx.rank.fork_server. As a program this file is the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from typing import Any

PACKET = 1 << 16


class Process:
    """The part of a Popen that ForkServer uses."""

    def __init__(self, pid: int, output: int, status: int):
        self.pid, self.stdout, self._status, self._code = pid, os.fdopen(output, "rb"), status, None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("", timeout or 0.0)
            self._code = int(os.read(self._status, 20) or -signal.SIGKILL)
            os.close(self._status)
        return self._code

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Preloaded:
    DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, module: str):
        """The process has this module imported."""
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", __file__, str(theirs.fileno()), module]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def Popen(self, command: list[str], env: dict[str, str], pass_fds: tuple[int, int], **_: Any) -> Process:  # noqa: N802
        _, _, _, module, *_ = command  # python -P -m MODULE, and the descriptors' numbers
        (output, written), (status, told) = os.pipe(), os.pipe()
        with self._lock:
            socket.send_fds(self._control, [json.dumps([module, env]).encode()], [*pass_fds, written, told])
            pid = int(self._control.recv(20))
        os.close(written)
        os.close(told)
        return Process(pid, output, status)

    def close(self) -> None:
        self._control.close()
        self._process.wait(10)


def serve(control: socket.socket) -> None:
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    running: dict[int, int] = {}  # where each child's exit code is told
    while True:
        ready = select.select([control, woken], [], [])[0]
        if woken in ready:
            os.read(woken, PACKET)
            for pid, told in [*running.items()]:
                found, code = os.waitpid(pid, os.WNOHANG)
                if found:
                    with contextlib.suppress(BrokenPipeError):
                        os.write(told, str(os.waitstatus_to_exitcode(code)).encode())
                    os.close(running.pop(pid))
        if control in ready:
            data, files, _, _ = socket.recv_fds(control, PACKET, 4)
            if not data:
                return
            if not (pid := os.fork()):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                for one in (woken, wakes, *running.values()):
                    os.close(one)
                os._exit(run(*json.loads(data), *files))
            running[pid] = files[3]
            control.send(str(pid).encode())
            for one in files[:3]:
                os.close(one)


def run(module: str, env: dict[str, str], control: int, settings: int, output: int, told: int) -> int:
    """Be the fork server; its exit code."""
    os.close(told)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [module, str(control), str(settings)]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    runpy.run_module(sys.argv[2], run_name=sys.argv[2])
    with contextlib.suppress(ImportError):
        import llguidance  # noqa: F401
    serve(socket.socket(fileno=int(sys.argv[1])))
