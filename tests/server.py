"""A live `phalanx serve`, started as a user would, with its processes found by what they are."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .processes import Started, wait
from .ranks import AS_ROOT, clean

PHALANX = str(Path(sys.executable).parent / "phalanx")


class Server:
    """Use it as a context manager; nothing that it started outlives it."""

    def __init__(
        self, *arguments: str, command: Sequence[str] = (), job: Sequence[str] = (), wait: bool = True, **env: str
    ):
        """command: the words before `phalanx serve`. job: all words, of something else that starts it."""
        environ = clean() | AS_ROOT | env
        self.process = subprocess.Popen(
            job or [*command, PHALANX, "serve", *arguments, "--p", "0"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.url = ""
        self.started = Started(self.process.pid)
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            self.wait_ready()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.take(line)
        self._ready.set()

    def take(self, line: str) -> None:
        """Keep a line of the output, and what it says of the server."""
        self.lines.append(line)
        if found := re.search(r"at (http://[^\s;]+)", line):
            self.url = found.group(1)
        if found := re.search(r"ready: (http://\S+)/v1", line):
            self.url = found.group(1)
            self._ready.set()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_ready(self, seconds: float = 60) -> None:
        if not self._ready.wait(seconds) or self.process.poll() is not None:
            self.close()
            raise AssertionError(f"not ready:\n{self.output}")
        self.started.look()

    def wait_ranks(self, count: int) -> None:
        """Until so many ranks run here, loaded or not."""
        assert not wait(lambda: len(self.ranks) < count, 30), self.output

    def pids(self, kind: str) -> list[int]:
        """Running processes whose command line ends with or contains `kind`."""
        return [p for p, line in self.started.look().items() if re.search(kind, line)]

    @property
    def ranks(self) -> list[int]:
        """The ranks' processes in the order of their ids, which on one host is that of the ranks."""
        return self.pids(r"-m phalanx\.rank$")

    @property
    def server_pid(self) -> int:
        return self.pids(r"-m phalanx\.rank\.server$")[0]

    @property
    def mpirun(self) -> int:
        return self.pids(r"^(.*/)?(mpirun|prterun|mpiexec) -")[0]

    def exit_code(self, seconds: float = 30) -> int:
        """Wait for the job's end; the code that the user's shell sees."""
        self.started.look()
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def left(self, seconds: float = 10) -> dict[int, str]:
        """Processes that still run of all that were started, after waiting for their end."""
        return self.started.left(seconds)

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
        """In order where that works, as who is killed cannot tidy up; what is open is cut off after a second."""
        if self.url:
            for seconds in (1, 5):
                if self.process.poll() is None:
                    self.process.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.process.wait(seconds)
        self.started.kill()
        self.process.wait()
        self._reader.join(5)


class Stream:
    """A client that reads a stream of many tokens, begun before the constructor returns."""

    def __init__(self, server: Server, max_tokens: int = 20000):
        body = json.dumps(
            {"prompt": [5, 6, 7], "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
        ).encode()
        request = urllib.request.Request(server.url + "/v1/completions", body, {"Content-Type": "application/json"})
        self.answer = urllib.request.urlopen(request, timeout=30)
        assert self.answer.readline().startswith(b"data: ")

    def rest(self) -> str:
        """Bytes until the connection closed, whichever way it did."""
        found = b""
        try:
            while data := self.answer.read1(65536):
                found += data
        except (OSError, http.client.HTTPException):
            pass  # cut off
        return found.decode(errors="replace")
