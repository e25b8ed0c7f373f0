"""`phalanx serve` whole: live ranks, the real front, and every way to end it while clients read."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request

import psutil
import pytest

from ..checkpoints import make_checkpoint
from .jobs import Launched, alive

pytestmark = pytest.mark.timeout(90)
HOST = socket.gethostname()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("serve") / "ckpt", max_position_embeddings=8192))


class Server(Launched):
    """A live server of two ranks."""

    def __init__(self, place, checkpoint, *argv):
        options = ["--p", "0", "--device", "cpu", "--np", "2", "--mem", "64", "--dtype", "f32", "--timeout", "6"]
        super().__init__([sys.executable, "-m", "phalanx.launcher.cli", "serve", checkpoint, *options, *argv], place)
        self.known: list[int] = []

    @property
    def url(self) -> str:
        return re.search(r"at (http://127.0.0.1:\d+);", self.output)[1]

    def pids(self):
        with contextlib.suppress(psutil.NoSuchProcess):
            self.known += [one.pid for one in psutil.Process(self.process.pid).children(recursive=True)]
        return list(dict.fromkeys(self.known))

    def find(self, *words: str) -> list[int]:
        """Our processes whose command line ends with these words, or is that of mpirun."""
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.cmdline()[-len(words) :] == list(words):
                    found.append(one.pid)
        return sorted(found)

    def ready(self) -> "Server":
        self.until(lambda: "Phalanx is ready" in self.output, 40)
        self.pids()
        return self

    def post(self, **fields):
        body = json.dumps({"prompt": [5, 6, 7], "ignore_eos": True, "temperature": 0, **fields}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=40)

    def stream(self, tokens: int = 4000) -> "Stream":
        return Stream(self, tokens)


class Stream(threading.Thread):
    """Reads a long answer; what came of it is in `lines` and `error`."""

    def __init__(self, server: Server, tokens: int):
        super().__init__(daemon=True)
        self._answer = server.post(max_tokens=tokens, stream=True)
        self.lines = [self._answer.readline()]
        self.error: Exception | None = None
        self.start()

    def run(self):
        try:
            self.lines += list(self._answer)
        except Exception as error:
            self.error = error

    @property
    def complete(self) -> bool:
        return b"data: [DONE]\n" in self.lines and b'"error"' not in b"".join(self.lines)


@pytest.fixture
def server(tmp_path, checkpoint):
    with Server(tmp_path, checkpoint) as job:
        yield job.ready()


def test_it_answers_and_drains(server):
    """An open stream is finished, a new request is refused, and the code is 0."""
    with server.post(max_tokens=5) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 5
    curl = re.search(r"curl .*", server.output)[0]
    assert curl.startswith(f"curl {server.url}/v1/")
    stream = server.stream(1000)
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: "draining" in server.output)
    time.sleep(0.2)
    with pytest.raises(urllib.error.HTTPError) as error:
        server.post(max_tokens=1)
    assert error.value.code == 503
    assert server.end(60) == 0
    stream.join(5)
    assert stream.complete and stream.error is None
    assert server.no_directory()


def test_the_second_signal_stops_a_stream(server):
    stream = server.stream()
    server.process.send_signal(signal.SIGINT)
    server.until(lambda: "draining" in server.output)
    server.process.send_signal(signal.SIGINT)
    assert server.end(6) == 130
    stream.join(5)
    assert not stream.is_alive() and not stream.complete


@pytest.mark.parametrize(
    ("victim", "code"), [("rank 0", 137), ("follower", 137), ("mpirun", 137), ("front", 70), ("launcher", -9)]
)
def test_sigkill_under_load(server, victim, code):
    ranks = server.find("-m", "phalanx.rank")
    pids = {
        "rank 0": ranks[0],
        "follower": ranks[1],
        "mpirun": psutil.Process(ranks[0]).ppid(),
        "front": server.find("-m", "phalanx.rank.front")[0],
        "launcher": server.process.pid,
    }
    stream = server.stream()
    os.kill(pids[victim], signal.SIGKILL)
    assert server.process.wait(10) == code
    server.gone(10)
    stream.join(5)
    assert not stream.is_alive() and not stream.complete
    if victim == "follower":
        assert re.search(f"rank 1 on {HOST} (has died|was ended by signal 9)", server.output)


@pytest.mark.parametrize("victim", [0, 1])
def test_sigkill_while_loading(tmp_path, checkpoint, victim):
    with Server(tmp_path, checkpoint) as job:
        job.until(lambda: len(job.find("-m", "phalanx.rank")) == 2)
        ranks = job.find("-m", "phalanx.rank")
        job.pids()
        os.kill(ranks[victim], signal.SIGKILL)
        assert job.end() == 137
        assert "Phalanx is ready" not in job.output


def test_ctrl_c_while_loading(tmp_path, checkpoint):
    with Server(tmp_path, checkpoint) as job:
        job.until(lambda: len(job.find("-m", "phalanx.rank")) == 2)
        job.pids()
        job.process.send_signal(signal.SIGINT)
        assert job.end(6) == 0
        assert "phalanx: ending: no request was accepted yet" in job.output


def test_a_stopped_follower_is_named(server):
    stream = server.stream()
    os.kill(server.find("-m", "phalanx.rank")[1], signal.SIGSTOP)
    assert server.end(12) == 71
    assert re.search(rf"rank 1 on {HOST}\b", server.output)
    stream.join(5)
    assert not stream.is_alive() and not stream.complete


def test_restart(tmp_path, checkpoint):
    """The port stays open: 503 with Retry-After while the ranks come back, then answers again."""
    with Server(tmp_path, checkpoint, "--restarts", "1") as job:
        job.ready()
        front = job.find("-m", "phalanx.rank.front")
        os.kill(job.find("-m", "phalanx.rank")[1], signal.SIGKILL)
        job.until(lambda: "starting the ranks again (0 restarts left)" in job.output)
        with pytest.raises(urllib.error.HTTPError) as error:
            job.post(max_tokens=1)
        assert error.value.code == 503 and error.value.headers["Retry-After"]

        def answers() -> bool:
            try:
                return job.post(max_tokens=2).status == 200
            except urllib.error.HTTPError:
                return False

        job.until(answers, 30)
        assert job.find("-m", "phalanx.rank.front") == front and alive(front[0])
        job.pids()
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 0


def test_an_unreadable_model(tmp_path, checkpoint):
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in os.listdir(checkpoint):
        if not name.endswith(".safetensors"):
            os.symlink(f"{checkpoint}/{name}", broken / name)
    with Server(tmp_path, str(broken)) as job:
        assert job.end(30) == 3
        assert "broken has neither model.safetensors nor model.safetensors.index.json" in job.output
        assert "----" not in job.output and "prterun" not in job.output
