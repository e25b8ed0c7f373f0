"""`phalanx chat` against a server that is a few lines of http.server."""

import http.server
import io
import json
import os
import re
import socket
import threading
import time

import pytest
from phalanx.launcher import cli
from phalanx.launcher.tool_thread import DENIED
from phalanx.rank.server import server_registry, tls
from phalanx.rank.server.server_registry import RegisteredServer

from ...certificates import make_certificate
from ...fields import each
from ...rank.mcp_servers import STDIO, free_port, written


class Server(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, json.dumps({"data": [{"id": "tiny", **getattr(self.server, "entry", {})}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((body, self.headers.get("Authorization")))
        if self.server.fails:
            return self.answer(self.server.fails, json.dumps({"error": {"message": "the queue is full"}}).encode())
        text = str(len(body["messages"]))
        deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm "}, {"content": "answer "}]
        if getattr(self.server, "call", "") and not any(message["role"] == "tool" for message in body["messages"]):
            start, rest = {"name": self.server.call, "arguments": ""}, {"arguments": '{"a": 2, "b": 3}'}
            deltas += [{"tool_calls": [{"index": 0, "id": "c1", "function": start}]}]
            deltas += [{"tool_calls": [{"index": 0, "function": rest}]}]
        events = [{"choices": [{"delta": delta}]} for delta in (*deltas, {"content": text}, {})]
        lines = [b": keep-alive\n\n", *(f"data: {json.dumps(event)}\n\n".encode() for event in events)]
        self.answer(200, b"".join([*lines, b"data: [DONE]\n\n"]), "text/event-stream")

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    http_server.seen, http_server.fails, http_server.call = [], 0, ""
    thread = threading.Thread(target=http_server.serve_forever, daemon=True)
    thread.start()
    yield http_server
    http_server.shutdown()
    http_server.server_close()
    thread.join()


def chat(server, monkeypatch, text, *argv):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return cli.main(["chat", "--p", str(server.server_port), *argv])


def test_a_conversation(server, monkeypatch, capsys):
    assert chat(server, monkeypatch, "one\ntwo\n/new\nthree\n", "--system", "be brief", "--temperature", "0") == 0
    assert "answer 2" in capsys.readouterr().out
    bodies = [body for body, _ in server.seen]
    assert each(bodies[1]["messages"], "content") == ["be brief", "one", "answer 2", "two"]
    assert bodies[0]["temperature"] == 0
    assert bodies[0]["stream"] is True
    assert "top_p" not in bodies[0]


def test_a_terminal_is_told_how_to_end(server, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal("\n"))
    assert cli.main(["chat", "--p", str(server.server_port)]) == 0
    assert " at http://127.0.0.1:" in (said := capsys.readouterr().out)
    assert f":{server.server_port}; " in said and "/help" in said


def test_url_key_and_thinking(server, monkeypatch):
    url = f"http://127.0.0.1:{server.server_port}/v1/"
    argv = ("--url", url, "--api-key", "k", "--no-thinking", "--max-tokens", "7")
    assert chat(server, monkeypatch, "one\n", *argv) == 0
    ((body, authorization),) = server.seen
    assert (authorization, body["enable_thinking"], body["max_tokens"]) == ("Bearer k", False, 7)


@pytest.mark.parametrize(("argv", "tokens"), [((), 256), (("--max-tokens", "900"), 900)])
def test_answers_of_a_base_model_end(server, monkeypatch, capsys, argv, tokens):
    server.entry = {"chat_template": False}
    assert chat(server, monkeypatch, "one\n", *argv) == 0
    assert server.seen[0][0]["max_tokens"] == tokens
    said = capsys.readouterr().err
    assert "base model" in said and "/v1/completions" in said and f"{tokens} tokens" in said


def test_no_proxy_stands_before_this_machine(server, monkeypatch, capsys):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert chat(server, monkeypatch, "one\n") == 0
    assert chat(server, monkeypatch, "one\n", "--h", "0.0.0.0") == 0
    assert chat(server, monkeypatch, "one\n", "--h", "other.invalid") == 2  # other machines: as the user has set it
    assert "[Errno 111] Connection refused" in capsys.readouterr().err


def test_a_refusal(server, monkeypatch, capsys):
    server.fails = 429
    assert chat(server, monkeypatch, "one\n") == 1
    assert "/v1/chat/completions: the queue" in capsys.readouterr().err


def test_no_server(monkeypatch, capsys):
    assert cli.main(["chat", "--p", "1"]) == 2
    assert "http://127.0.0.1:1/v1/models ([Errno 111] Connection" in capsys.readouterr().err


def test_options_of_the_server_in_a_shared_file_are_passed_over(server, monkeypatch, tmp_path, capsys):
    file = tmp_path / "phalanx.yaml"
    file.write_text("mem: 100\ntemperature: 0.5\n")
    monkeypatch.setenv("PHALANX_RANKS", "2")
    assert chat(server, monkeypatch, "one\n", "--config", str(file)) == 0
    assert server.seen[0][0]["temperature"] == 0.5
    assert capsys.readouterr().err == ""
    assert cli.main(["chat", "--tmperature", "1"]) == 2
    assert "phalanx: unknown option --tmperature;" in capsys.readouterr().err


# Found by its job file.


@pytest.fixture
def leave(monkeypatch, tmp_path):
    """Writes the job file of a server of this process, or of another host."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def write(name, **given):
        pid = os.getpid()
        known = {"host": socket.gethostname(), "model": "tiny", "pid": pid, "start": server_registry.start_of(pid)}
        known["pids"] = server_registry.namespace()
        path = server_registry.directory() / f"{name}.json"
        server_registry.write(path, RegisteredServer(**{**known, **given}))
        return path

    return write


def talk(monkeypatch, *argv):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    return cli.main(["chat", *argv])


def test_the_running_server_is_found(server, leave, monkeypatch, capsys):
    url = f"http://127.0.0.1:{server.server_port}"
    leave("here-1", url=url, key="secret")
    gone = leave("here-2", url="http://127.0.0.1:1", start=1)
    assert talk(monkeypatch) == 0
    assert chat(server, monkeypatch, "one\n") == 0  # named by its port
    assert talk(monkeypatch, "--api-key", "other") == 0
    assert [key for _, key in server.seen] == ["Bearer secret", "Bearer secret", "Bearer other"]
    assert not gone.exists()
    assert talk(monkeypatch, "--job", "here-2") == 2
    assert "phalanx: --job here-2:" in capsys.readouterr().err


def test_one_of_several_is_chosen(server, leave, monkeypatch, capsys):
    url = f"http://127.0.0.1:{server.server_port}"
    leave("here-1", url="http://127.0.0.1:1", model="small", since=2.0)
    leave("here-2", url=url, batch="991.pbs", since=1.0)
    assert talk(monkeypatch) == 2
    when = [time.strftime("since %d %b %H:%M", time.localtime(one)) for one in (1.0, 2.0)]
    head, *rows = capsys.readouterr().err.splitlines()
    assert "2 servers" in head and "--job NAME" in head
    assert rows == [
        f"  here-2  job 991.pbs  tiny   {url:22}  {when[0]}",
        f"  here-1               small  {'http://127.0.0.1:1':{max(22, len(url))}}  {when[1]}",
    ]
    for name in ("here-2", "991.pbs", "991", "tiny"):
        assert talk(monkeypatch, "--job", name) == 0
    assert len(server.seen) == 4


def test_no_job_at_all(leave, monkeypatch, capsys):
    assert talk(monkeypatch, "--job", "991") == 2
    assert "phalanx: --job 991:" in capsys.readouterr().err


def test_the_loopback_of_another_host(server, leave, monkeypatch, capsys):
    leave("node7-5", url="http://127.0.0.1:2000", host="node7", key="k", batch="991")
    assert talk(monkeypatch) == 2
    assert "--job node7-5 --url http://127.0.0.1:2000" in capsys.readouterr().err
    assert talk(monkeypatch, "--job", "991", "--url", f"http://127.0.0.1:{server.server_port}/") == 0
    assert talk(monkeypatch, "--job", "991", "--p", str(server.server_port)) == 0
    assert [key for _, key in server.seen] == ["Bearer k", "Bearer k"]


def test_a_server_of_another_host(server, leave, monkeypatch, capsys):
    """It is reached without the proxy, which knows the world outside the cluster."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setattr("phalanx.launcher.http_client.is_loopback", lambda host: False)
    path = leave("node7-5", url=f"http://127.0.0.1:{server.server_port}", host="node7")
    assert talk(monkeypatch) == 0
    leave("node7-5", url="http://127.0.0.1:1", host="node7")
    assert talk(monkeypatch) == 2
    assert re.search(f"refused.*node7-5.*remove {path}\n", capsys.readouterr().err)


def test_a_unix_socket_of_another_host(leave, monkeypatch, capsys):
    leave("node7-1", url="unix:///run/p", host="node7")
    assert talk(monkeypatch) == 2
    assert "node7-1 listens on unix:///run/p" in capsys.readouterr().err


def test_a_unix_socket(leave, monkeypatch, capsys, tmp_path):
    path = str(tmp_path / "http")

    class UnixServer(http.server.ThreadingHTTPServer):
        address_family = socket.AF_UNIX
        server_name, server_port, seen, fails = "localhost", 0, [], 0

        def server_bind(self):
            self.socket.bind(path)

        def get_request(self):
            return self.socket.accept()[0], ("", 0)

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with UnixServer(path, Server) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        leave("here-1", url=f"unix://{path}", key="k")
        assert talk(monkeypatch) == 0 == talk(monkeypatch, "--url", f"unix://{path}")
        running.shutdown()
    assert [key for _, key in running.seen] == ["Bearer k", "Bearer k"]
    os.unlink(path)
    assert talk(monkeypatch) == 2
    assert "server answers at unix:///" in capsys.readouterr().err


def test_tls(server, leave, monkeypatch, capsys, tmp_path):
    """The server's file has its certificate, by which it is known under any name."""
    (cert, key), (other, _) = make_certificate(tmp_path / "a", "node7"), make_certificate(tmp_path / "b")
    server.socket = tls.server_context(cert, key).wrap_socket(server.socket, server_side=True)
    url = f"https://127.0.0.1:{server.server_port}"
    leave("here-1", url=url, certificate=tls.certificate(cert))
    assert talk(monkeypatch) == 0 == talk(monkeypatch, "--url", url)
    leave("here-1", url=url, certificate=tls.certificate(other))
    assert talk(monkeypatch) == 2
    assert "certificate verify failed" in capsys.readouterr().err


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("argv", "text", "result"),
    [([], "hi\n", "5"), (["--approve"], "hi\ny\n", "5"), (["--approve"], "hi\n\n", DENIED)],
)
def test_tools_of_servers_are_called(server, monkeypatch, capsys, tmp_path, argv, text, result):
    dead = {"url": f"http://127.0.0.1:{free_port()}/mcp"}
    config = written(tmp_path, {"mcpServers": {"local": STDIO, "dead": dead}})
    server.call = "local_add"
    assert chat(server, monkeypatch, text, "--mcp", config, *argv) == 0
    out = capsys.readouterr()
    assert "[local_add" in out.out and "answer 3" in out.out and "tool server dead:" in out.err
    first, second = (body for body, _ in server.seen)
    assert "local_add" in {tool["function"]["name"] for tool in first["tools"]}
    assert each(second["messages"], "role") == ["user", "assistant", "tool"]
    assert second["messages"][-1]["content"] == result


def test_a_wrong_file_of_tool_servers(server, monkeypatch, capsys, tmp_path):
    assert chat(server, monkeypatch, "hi\n", "--mcp", str(tmp_path / "none")) == 2
    assert "--mcp" in capsys.readouterr().err
