"""`phalanx gateway` in front of live servers: found by their files, left by their drain, lost by their kill."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import threading
import urllib.error
import urllib.request

import pytest
from phalanx import errors
from phalanx.rank.server import server_registry

from ... import retries
from ...checkpoints import make_checkpoint
from ...processes import wait
from ...ranks import clean
from ...server import PHALANX, Server, Stream

pytestmark = [pytest.mark.timeout(180), retries.KILLS]
SERVE = ("--device", "cpu", "--mem", "64")


class Gateway:
    """`phalanx gateway`, as a context manager."""

    def __init__(self, *arguments: str, **env: str):
        self.process = subprocess.Popen(
            [PHALANX, "gateway", "--p", "0", *arguments],
            env=clean() | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self.url = ""
        self._known = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._known.wait(60), self.lines

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"at (https?://[^\s;]+);", line):
                self.url = found.group(1)
                self._known.set()

    request = Server.request

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)


@pytest.mark.long
def test_one_address_for_jobs_that_come_and_go(tmp_path):
    env = {"XDG_STATE_HOME": str(tmp_path)}
    serve = (str(make_checkpoint(tmp_path / "tiny", max_position_embeddings=32768)), *SERVE)
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    with Gateway(**env) as gateway, contextlib.ExitStack() as servers:
        held: list[int] = []
        holding = threading.Thread(target=lambda: held.append(gateway.request("/v1/chat/completions", body)[0]))
        holding.start()
        first = servers.enter_context(Server(*serve, **env))
        holding.join(60)
        assert held == [200]
        status, answer, _ = gateway.request("/v1/chat/completions", body)
        assert status == 200 and answer["usage"]["completion_tokens"] > 0
        stream = Stream(gateway, 20000)
        second = servers.enter_context(Server(*serve, **env))
        first.process.send_signal(signal.SIGUSR1)  # drains: what is open goes on, what is new goes to the other job
        models = lambda: gateway.request("/health")[1]["models"].values()  # noqa: E731
        assert not wait(lambda: not any("draining" in states for states in models()), 20)
        for _ in range(5):
            assert gateway.request("/v1/chat/completions", body)[0] == 200
        os.kill(first.server_pid, signal.SIGKILL)  # in the middle of the stream
        *_, last, end = stream.rest().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "job_lost" and not end
        assert gateway.request("/v1/chat/completions", body)[0] == 200
        assert second.metric("phalanx_requests_total") >= 5
        rest = Stream(gateway, 2000)
        gateway.process.send_signal(signal.SIGTERM)  # what is open is finished
        assert rest.rest().endswith("data: [DONE]\n\n")
        assert gateway.process.wait(30) == errors.OK
        with pytest.raises((OSError, http.client.HTTPException, urllib.error.URLError)):
            urllib.request.urlopen(gateway.url + "/health", timeout=5)


def test_jobs_elsewhere_and_of_one_user(tmp_path):
    """--jobs names another directory, and what others could write is not read."""
    place = tmp_path / "jobs"
    with Gateway("--jobs", str(place), "--hold", "0.2") as gateway:
        assert gateway.request("/v1/models")[0] == 503
        job = server_registry.RegisteredServer("http://127.0.0.1:9", "elsewhere", "m", 1)
        server_registry.write(place / "x.json", job)
        assert not wait(lambda: not any("passed over" in line for line in gateway.lines), 10)
        assert gateway.request("/health")[1]["models"] == {}


@pytest.mark.parametrize(
    "arguments, word", [(("--tls-key", "k"), "--tls-cert"), (("--h", "no.such.host.example"), "no.such.host.example")]
)
def test_options_that_cannot_be(arguments, word):
    ended = subprocess.run([PHALANX, "gateway", *arguments], env=clean(), capture_output=True, text=True, timeout=60)
    assert ended.returncode == errors.USAGE and word in ended.stderr
