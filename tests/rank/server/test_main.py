"""The process itself: started as the launcher starts it, ended in every way it can end."""

import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import msgspec
import pytest
from phalanx import errors
from phalanx.rank import protocol
from phalanx.rank.server import server_registry
from phalanx.rank.server.__main__ import ready_line
from phalanx.rank.server.api_error import NOT_TAKEN
from phalanx.rank.server.config import ServerConfig

from ... import retries
from ...config_pipe import config_pipe
from ...processes import wait
from .conftest import make_model

pytestmark = [pytest.mark.timeout(40), retries.KILLS]


class Process:
    """A server process and, in the test, the scheduler's socket."""

    def __init__(self, tmp_path, model_dir, sock=None, **options):
        self.sock = sock or socket.create_server(("127.0.0.1", 0))
        self.link = str(tmp_path / "link")
        config = {"model_dir": str(model_dir), "link": self.link, "listen_fd": self.sock.fileno(), **options}
        with config_pipe(config) as fd:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "phalanx.rank.server"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                pass_fds=[self.sock.fileno(), fd],
                env={**os.environ, "PHALANX_SERVER": str(fd)},
            )
        self.scheduler = None

    @property
    def port(self):
        return self.sock.getsockname()[1]

    def connect(self):
        until = time.monotonic() + 10
        while self.scheduler is None:
            scheduler = socket.socket(socket.AF_UNIX)
            try:
                scheduler.connect(self.link)
                self.scheduler = scheduler
            except OSError:
                scheduler.close()
                assert time.monotonic() < until and self.process.poll() is None, self.process.stdout.read()
                time.sleep(0.02)

    def ready(self):
        self.connect()
        self.send(
            protocol.Ready(max_model_len=512, vocab_size=400, kv_tokens=512, block_size=16, max_num_seqs=4, ranks=1)
        )
        return self.process.stdout.readline(), self.process.stdout.readline()

    def send(self, message):
        self.scheduler.sendall(protocol.frame(message))

    def receive(self):
        frames, messages = protocol.Frames(protocol.ToScheduler), []
        while not messages:
            messages = frames.feed(self.scheduler.recv(1 << 16))
        return messages[0]

    def health(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def end(self):
        if self.scheduler is not None:
            self.scheduler.close()
        self.sock.close()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path, model_dir):
    started = []

    def start(**options):
        started.append(Process(tmp_path, options.pop("model", model_dir), **options))
        return started[-1]

    yield start
    for process in started:
        process.end()


def test_loading_then_ready_then_drain(start):
    fresh_server = start(served_model_name="tiny")
    fresh_server.connect()
    fresh_server.send(protocol.Progress("weights", 3, 10))
    status, body = fresh_server.health()
    assert (status, body["status"]) == (503, "loading")
    ready, example = fresh_server.ready()
    url = f"http://127.0.0.1:{fresh_server.port}/v1"
    assert f"{url} (model tiny)" in ready
    curl, address, *_, body = shlex.split(example)
    assert (curl, address) == ("curl", f"{url}/chat/completions") and list(json.loads(body)) == ["messages"]
    assert fresh_server.health()[0] == 200
    fresh_server.process.send_signal(signal.SIGUSR1)
    assert isinstance(fresh_server.receive(), protocol.Drain)
    status, body = fresh_server.health()
    assert (status, body["status"]) == (503, "draining")
    fresh_server.scheduler.close()
    assert fresh_server.process.wait(5) == errors.OK


@pytest.mark.parametrize("how, code", [("term", errors.OK), ("eof", errors.RANK_FAILED), ("fatal", errors.MEMORY)])
def test_ends_soon(start, how, code):
    fresh_server = start()
    fresh_server.ready()
    if how == "term":
        fresh_server.process.terminate()
    elif how == "eof":
        fresh_server.scheduler.close()
    else:
        fresh_server.send(protocol.Fatal("not enough memory", errors.MEMORY))
        fresh_server.scheduler.close()
    assert fresh_server.process.wait(5) == code


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "tokenizer_config.json", "config.json"])
def test_model_files_that_are_nested_too_deeply_end_it_with_one_line(start, tmp_path, model_dir, name):
    broken = shutil.copytree(model_dir, tmp_path / "broken")
    (broken / name).write_text('{"a":' * 100_000)
    fresh_server = start(model=broken)
    assert fresh_server.process.wait(20) == errors.MODEL
    (line,) = fresh_server.process.stdout.read().splitlines()
    assert name in line and len(line) < 400


@pytest.mark.parametrize("given", [{}, {"PHALANX_SERVER": "{}"}, {"PHALANX_SERVER": "99"}])
def test_a_configuration_is_needed(given):
    env = {name: value for name, value in os.environ.items() if name != "PHALANX_SERVER"} | given
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.rank.server"], env=env, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == errors.USAGE
    assert "PHALANX_SERVER" in done.stderr and "`phalanx serve`" in done.stderr and done.stderr.count("\n") == 1


def test_model_without_tokenizer(start, tmp_path):
    (tmp_path / "empty").mkdir()
    fresh_server = start(model=tmp_path / "empty")
    assert fresh_server.process.wait(10) == errors.MODEL
    assert re.search("tokenizer.json.*tekken.json", fresh_server.process.stdout.read())


def test_model_with_a_wrong_default_of_sampling(start, tmp_path):
    model = make_model(tmp_path / "m")
    (model / "generation_config.json").write_text('{"top_k": 50.0}')
    fresh_server = start(model=model)
    assert fresh_server.process.wait(10) == errors.MODEL
    assert "top_k is 50.0" in fresh_server.process.stdout.read()


def test_open_streams_get_an_error_when_the_process_is_stopped(start):
    fresh_server = start()
    fresh_server.ready()
    with socket.create_connection(("127.0.0.1", fresh_server.port), timeout=10) as client:
        body = b'{"prompt": "x", "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        request = fresh_server.receive()
        fresh_server.send(protocol.Deltas([protocol.Delta(request.id, [70])]))
        answer = client.recv(1 << 16)
        fresh_server.process.terminate()
        while part := client.recv(1 << 16):
            answer += part
    assert b'data: {"error":{"message":"the server is stopping' in answer
    assert b"[DONE]" not in answer
    assert fresh_server.process.wait(5) == errors.OK


@pytest.mark.parametrize("drained", [False, True])
def test_a_request_that_is_not_whole_when_the_process_ends_gets_503(start, drained):
    fresh_server = start()
    fresh_server.ready()
    with socket.create_connection(("127.0.0.1", fresh_server.port), timeout=10) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert fresh_server.health()[0] == 200  # so it was read
        if drained:
            fresh_server.process.send_signal(signal.SIGUSR1)
            assert isinstance(fresh_server.receive(), protocol.Drain)
            fresh_server.scheduler.close()
        else:
            fresh_server.process.terminate()
        answer = b""
        while part := client.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.1 503 ") and b'"service_unavailable_error"' in answer
    assert fresh_server.process.wait(5) == errors.OK


def test_stays_while_restarts_are_expected(start):
    fresh_server = start(restarts_expected=True)
    fresh_server.ready()
    fresh_server.scheduler.close()
    fresh_server.scheduler = None
    fresh_server.connect()
    fresh_server.send(protocol.Progress("weights", 1, 2))
    until = time.monotonic() + 5
    while fresh_server.health()[1].get("progress") != {"phase": "weights", "done": 1, "total": 2}:
        assert time.monotonic() < until
        time.sleep(0.02)
    fresh_server.process.terminate()
    assert fresh_server.process.wait(5) == errors.OK


def test_ends_with_its_parent(tmp_path, model_dir):
    """However the parent ends: here by SIGKILL."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        config = {"model_dir": str(model_dir), "link": str(tmp_path / "link"), "listen_fd": sock.fileno()}
        with config_pipe(config) as fd:
            parent = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "import subprocess, sys, time\nfds = [int(fd) for fd in sys.argv[1:]]\n"
                    "child = subprocess.Popen([sys.executable, '-m', 'phalanx.rank.server'], pass_fds=fds,\n"
                    "                         start_new_session=True)\nprint(child.pid, flush=True)\ntime.sleep(30)",
                    str(sock.fileno()),
                    str(fd),
                ],
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[sock.fileno(), fd],
                env={**os.environ, "PHALANX_SERVER": str(fd)},
            )
        child = os.pidfd_open(int(parent.stdout.readline()))
        port = sock.getsockname()[1]
        with pytest.raises(urllib.error.HTTPError, match="503"):  # it is up
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    ended, _, _ = select.select([child], [], [], 4)
    os.close(child)
    assert ended


def test_cores_that_are_not_there(start):
    said = start(cpus=[8191]).process.stdout.readline()
    assert "server process stays" in said and said.endswith("Invalid argument\n")


def test_wrong_parent(start):
    fresh_server = start(parent_pid=1)
    assert fresh_server.process.wait(10) == errors.ERROR


@pytest.mark.parametrize(
    "options, chat, expected",
    [
        (
            {"url": "http://node:80/v1", "api_keys": ["k"]},
            False,
            "Phalanx is ready: http://node:80/v1 (model m). Try:\n"
            "  curl http://node:80/v1/completions -H 'Content-Type: application/json' "
            "-H 'Authorization: Bearer YOUR_API_KEY' "
            '-d \'{"prompt": "Once upon a time", "max_tokens": 64}\'',
        ),
        (
            {"url": "unix:///run/p"},
            True,
            "Phalanx is ready: unix:///run/p (model m). Try:\n  curl --unix-socket /run/p "
            "http://localhost/v1/chat/completions -H 'Content-Type: application/json' "
            '-d \'{"messages": [{"role": "user", "content": "Hello!"}]}\'',
        ),
    ],
)
def test_ready_line(options, chat, expected):
    assert ready_line(ServerConfig(model_dir="m", link="l", listen_fd=-1, **options), "m", chat) == expected


def test_ready_line_of_a_unix_socket(tmp_path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "http"))
        line = ready_line(ServerConfig(model_dir="m", link="l", listen_fd=sock.fileno()), "m", True)
    assert f"unix:{tmp_path}/http (model m)" in line and f"--unix-socket {tmp_path}/http " in line


def test_its_job_file_is_there_while_it_runs(start, tmp_path):
    path = tmp_path / "state" / "jobs" / "here-1.json"
    end = time.time() + 3600
    fresh_server = start(
        registry_file=str(path), url="http://node7:2000/v1", api_keys=["k", "other"], batch_job="991", end_time=end
    )
    fresh_server.connect()
    until = time.monotonic() + 10
    while not path.exists():  # written when the scheduler can connect
        assert time.monotonic() < until
        time.sleep(0.02)
    (job,) = server_registry.running(path.parent, socket.gethostname()).values()
    assert (job.url, job.host, job.model) == ("http://node7:2000", socket.gethostname(), "tiny")
    assert (job.pid, job.key, job.batch, job.end) == (fresh_server.process.pid, "k", "991", end)
    assert abs(job.since - time.time()) < 60
    fresh_server.process.terminate()
    assert fresh_server.process.wait(5) == errors.OK
    assert not list(path.parent.iterdir())


def test_its_job_file_says_whether_it_takes_requests(start, tmp_path):
    path = tmp_path / "jobs" / "here-1.json"
    fresh_server = start(registry_file=str(path), served_model_name="tiny,small")

    def until(state):
        deadline = time.monotonic() + 10
        while not (found := server_registry.running(path.parent, "")) or found["here-1"].state != state:
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
        return found["here-1"]

    fresh_server.connect()
    first = until("starting")
    assert first.models == ["tiny", "small"]
    fresh_server.ready()
    assert until("ready").beat >= first.beat > 0
    fresh_server.process.send_signal(signal.SIGUSR1)
    until("draining")
    request = urllib.request.Request(
        f"http://127.0.0.1:{fresh_server.port}/v1/completions", b'{"prompt": "x"}', {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert (refused.value.code, refused.value.headers[NOT_TAKEN]) == (503, "draining")


def test_files_of_a_service_that_cannot_be_kept_end_the_start(start, tmp_path):
    (tmp_path / "file").write_text("")
    later = time.time() + 1000
    handover = {"command": ["true"], "directory": "/", "environ": {}}
    handover |= dict.fromkeys(("end", "submit_at", "drain_at", "stop_at"), later)
    fresh_server = start(file_store=str(tmp_path / "file" / "store"), handover=handover)
    assert fresh_server.process.wait(20) == errors.USAGE
    assert "--file-store" in fresh_server.process.stdout.read()


def test_files_come_from_the_job_before_once_that_has_given_them_up(start, tmp_path):
    """Also where the lock is seen on one node only, so that it is free here."""
    place, now = tmp_path / "jobs", time.time()
    before = server_registry.RegisteredServer(url="http://x:1", host="there", model="m", pid=1, has_files=True)

    def say(state, has_files):
        entry = msgspec.structs.replace(before, state=state, has_files=has_files, beat=time.time())
        server_registry.write(place / "old.json", entry)

    def has_files():
        own = server_registry.running(place, "").get("here-1")
        return own is not None and own.has_files

    say("ready", True)
    handover = {"command": ["true"], "directory": "/", "environ": {}}
    handover |= dict.fromkeys(("end", "submit_at", "drain_at", "stop_at"), now + 1000)
    store, own = str(tmp_path / "store"), str(place / "here-1.json")
    fresh_server = start(registry_file=own, file_store=store, predecessor="old", handover=handover)
    fresh_server.ready()
    for state, held in (("ready", True), ("draining", True), ("ready", False)):
        say(state, held)
        time.sleep(1)  # three times what it looks after
        assert not has_files()
    say("draining", False)
    assert not wait(lambda: not has_files(), 20)


@pytest.mark.parametrize("drained", [False, True])
def test_who_drains_a_job_by_hand_gets_no_successor(start, tmp_path, drained):
    now = time.time()
    handover = {"command": ["touch", "submitted"], "directory": str(tmp_path), "environ": dict(os.environ)}
    handover |= {"submit_at": now + 3, "drain_at": now + 1000, "stop_at": now + 1000, "end": now + 1000}
    fresh_server = start(registry_file=str(tmp_path / "jobs" / "here-1.json"), handover=handover)
    fresh_server.ready()
    if drained:
        fresh_server.process.send_signal(signal.SIGUSR1)
        while fresh_server.health()[1]["status"] != "draining":
            time.sleep(0.02)
    deadline = now + (5 if drained else 20)  # 2 s after a successor would have been submitted
    while time.time() < deadline and not (tmp_path / "submitted").exists():
        time.sleep(0.05)
    assert (tmp_path / "submitted").exists() is not drained


def test_a_server_without_a_place_for_its_job_file(start, tmp_path):
    (tmp_path / "file").write_text("")
    fresh_server = start(registry_file=str(tmp_path / "file" / "jobs" / "x.json"))
    assert f"chat` needs --url: {tmp_path}/file/jobs/x.json:" in fresh_server.process.stdout.readline()
    fresh_server.ready()
    assert fresh_server.health()[0] == 200


def test_idle_exit(start):
    """Loading and running requests are no idle time, looks at /health are."""
    fresh_server = start(idle_exit=0.025)  # 1.5 s
    fresh_server.connect()
    time.sleep(2)  # longer than --idle-exit: loading is no idle time
    fresh_server.ready()
    with socket.create_connection(("127.0.0.1", fresh_server.port), timeout=20) as client:
        body = b'{"prompt": "x", "max_tokens": 2}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        request = fresh_server.receive()
        assert isinstance(request, protocol.Request)
        time.sleep(2.5)  # longer than --idle-exit: a running request is none
        assert fresh_server.health()[1]["status"] == "ready"
        ended = time.monotonic()
        fresh_server.send(protocol.Deltas([protocol.Delta(request.id, [70, 70], finish="length")]))
        assert b"200 OK" in client.recv(1 << 16)
    fresh_server.scheduler.settimeout(0.1)
    drained = False
    while not drained:
        fresh_server.health()
        try:
            drained = isinstance(fresh_server.receive(), protocol.Drain)
        except TimeoutError:
            assert time.monotonic() < ended + 10
    assert time.monotonic() - ended > 0.4  # since the last look at the running request
    assert "0.025 minutes (--idle-exit):" in fresh_server.process.stdout.readline()
    fresh_server.scheduler.close()
    assert fresh_server.process.wait(5) == errors.OK
