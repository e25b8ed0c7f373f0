"""A live `phalanx serve`, started as a user would, with its processes found by what they are."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from .ranks import CLEAN

PHALANX = str(Path(sys.executable).parent / "phalanx")


def tree(pid: int) -> dict[int, str]:
    """All living descendants of a process and itself, with their command lines."""
    parents, lines = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                state, parent = (entry / "stat").read_text().rpartition(") ")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
                    lines[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
    found = {pid}
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return {p: lines[p] for p in sorted(found) if p in lines}


class Server:
    """Use it as a context manager; nothing that it started outlives it."""

    def __init__(self, *arguments: str, command: tuple[str, ...] = (), wait: bool = True, **env: str):
        environ = {k: v for k, v in os.environ.items() if not k.startswith((*CLEAN, "PHALANX_"))}
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **env}
        self.process = subprocess.Popen(
            [*command, PHALANX, "serve", *arguments, "--p", "0"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.url = ""
        self.started: dict[int, str] = {}
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            self.wait_ready()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"at (http://[^\s;]+)", line):
                self.url = found.group(1)
            if found := re.search(r"ready: (http://\S+)/v1", line):
                self.url = found.group(1)
                self._ready.set()
        self._ready.set()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_ready(self, seconds: float = 60) -> None:
        if not self._ready.wait(seconds) or self.process.poll() is not None:
            self.close()
            raise AssertionError(f"not ready:\n{self.output}")
        self.started = tree(self.process.pid)

    def pids(self, kind: str) -> list[int]:
        """Of the running processes, those whose command line ends with or contains `kind`."""
        self.started |= tree(self.process.pid)
        return [p for p, line in tree(self.process.pid).items() if re.search(kind, line)]

    @property
    def ranks(self) -> list[int]:
        """The ranks' processes in the order of their ids, which on one host is that of the ranks."""
        return self.pids(r"-m phalanx\.rank$")

    @property
    def front(self) -> int:
        return self.pids(r"-m phalanx\.rank\.front$")[0]

    @property
    def mpirun(self) -> int:
        return self.pids(r"^\S*(mpirun|prterun|mpiexec) ")[0]

    def exit_code(self, seconds: float = 15) -> int:
        """Wait for the job's end; the code that the user's shell sees."""
        self.started |= tree(self.process.pid)
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def left(self, seconds: float = 10) -> dict[int, str]:
        """What still runs of all that was started, after waiting for it to end."""
        until = time.monotonic() + seconds
        while (rest := self._living()) and time.monotonic() < until:
            time.sleep(0.05)
        return rest

    def _living(self) -> dict[int, str]:
        now = {}
        for pid, line in self.started.items():
            if tree(pid).get(pid) == line:
                now[pid] = line
        return now

    def request(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Status, decoded body and headers."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, text, found = answer.status, answer.read().decode(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            status, text, found = error.code, error.read().decode(), dict(error.headers)
        return status, json.loads(text) if text.startswith(("{", "[")) else text, found

    def metric(self, name: str) -> float:
        """One figure of /metrics, labels left out."""
        _, text, _ = self.request("/metrics")
        found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert found, f"no {name} in\n{text}"
        return float(found.group(1))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.started |= tree(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pid in self._living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._reader.join(5)
