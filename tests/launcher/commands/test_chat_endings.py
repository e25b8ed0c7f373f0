"""`phalanx chat` where an answer, its server or its input ends in another way than it should."""

import io
import signal
import subprocess
import sys
import time

import pytest
from phalanx.launcher import cli
from phalanx.launcher.commands.chat import conversation, display

from ... import retries
from .test_chat import Server, chat, server  # noqa: F401

pytestmark = [pytest.mark.timeout(60), retries.CLOCKS]
PIECE = b'data: {"choices": [{"index": 0, "delta": {"content": "Hello"}}]}\n\n'
BROKEN_OFF = "ended the answer before it was whole"
FORMAT = "answers in another format than OpenAI's"


class Rude(Server):
    def do_POST(self):
        if self.server.rest is None:
            return self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n%s" % (len(PIECE), PIECE, self.server.rest))
        self.wfile.flush()
        while self.server.waits:
            time.sleep(0.05)


@pytest.fixture
def rude(server):  # noqa: F811
    server.RequestHandlerClass, server.rest, server.waits = Rude, b"", False
    yield server
    server.waits = False


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        (b"0\r\n\r\n", BROKEN_OFF),
        (b"", BROKEN_OFF),
        (b'50\r\ndata: {"cho', BROKEN_OFF),
        (b"c\r\ndata: {oops\n\r\n0\r\n\r\n", FORMAT),
        (b"9\r\ndata: []\n\r\n0\r\n\r\n", FORMAT),
        (b'f\r\ndata: {"x": 1}\n\r\n0\r\n\r\n', FORMAT),
        (b'22\r\ndata: {"choices": [{"delta": 5}]}\n\r\n0\r\n\r\n', FORMAT),
        (b'17\r\ndata: {"error": "bad"}\n\r\n0\r\n\r\n', "phalanx: bad\n"),
    ],
)
def test_an_answer_that_breaks_off_is_told(rude, monkeypatch, capsys, rest, words):
    rude.rest = rest
    assert chat(rude, monkeypatch, "hi\n") == 1
    out, err = capsys.readouterr()
    assert out == "Hello\n" and words in err and len(err.splitlines()) == 1


def test_what_is_no_server_is_told(rude, monkeypatch, capsys):
    rude.rest = None
    assert chat(rude, monkeypatch, "hi\n") == 2
    out, err = capsys.readouterr()
    assert out == "" and "HTTP server" in err


@pytest.mark.parametrize(("key", "what"), [("", "it wants an API key"), ("k", "it takes another API key")])
def test_a_key_that_is_wanted_is_asked_for(server, monkeypatch, capsys, key, what):  # noqa: F811
    server.fails = 401
    assert chat(server, monkeypatch, "hi\n", "--api-key", key) == 1
    assert f"/v1/chat/completions: {what}: give" in capsys.readouterr().err


def test_an_address_without_its_scheme(capsys):
    assert cli.main(["chat", "--url", "127.0.0.1:2000"]) == 2
    assert "http://, https://, unix://" in capsys.readouterr().err


def test_ctrl_c_ends_a_conversation_from_a_file(rude, tmp_path):
    rude.waits = True
    command = [sys.executable, "-m", "phalanx.launcher.cli", "chat", "--p", str(rude.server_port)]
    (tmp_path / "said").write_text("one\ntwo\n")
    with open(tmp_path / "said") as said:
        process = subprocess.Popen(command, stdin=said, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert process.stdout.read(5) == b"Hello"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == (" …\n".encode(), b"") and process.returncode == 130


def test_blank_lines_of_a_file_are_passed_over(server, monkeypatch):  # noqa: F811
    assert chat(server, monkeypatch, "\none\n\n  \ntwo\n") == 0
    assert [body["messages"][-1]["content"] for body, _ in server.seen] == ["one", "two"]


def test_bytes_that_are_no_text(server, monkeypatch, capsys):  # noqa: F811
    for handling in ("strict", "surrogateescape"):
        with io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), "utf-8", handling) as said:
            monkeypatch.setattr("sys.stdin", said)
            assert cli.main(["chat", "--p", str(server.server_port)]) == 2
        assert (got := capsys.readouterr()).out == "" and "utf-8" in got.err
    assert not server.seen


def test_nobody_allows_a_call_at_the_end_of_the_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert not conversation._allowed()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert conversation._allowed()


@pytest.mark.parametrize(
    ("environ", "styled"), [({}, True), ({"TERM": "dumb"}, False), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True)]
)
def test_terminals_without_styles(monkeypatch, environ, styled):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    display.Plain().thought("hm")
    assert terminal.getvalue() == ("\x1b[2mhm\x1b[0m" if styled else "hm")
