"""`phalanx chat` against a server that is a few lines of http.server."""

import http.server
import io
import json
import threading

import pytest
from phalanx.launcher import cli


class Server(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((body, self.headers.get("Authorization")))
        if self.server.fails:
            return self.answer(self.server.fails, json.dumps({"error": {"message": "the queue is full"}}).encode())
        text = str(len(body["messages"]))
        deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm "}, {"content": "answer "}]
        events = [{"choices": [{"delta": delta}]} for delta in (*deltas, {"content": text}, {})]
        lines = [b": keep-alive\n\n", *(f"data: {json.dumps(event)}\n\n".encode() for event in events)]
        self.answer(200, b"".join([*lines, b"data: [DONE]\n\n"]), "text/event-stream")

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    http_server.seen, http_server.fails = [], 0
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
    assert capsys.readouterr().out == "hm answer 2\nhm answer 4\nhm answer 2\n"
    bodies = [body for body, _ in server.seen]
    assert [message["content"] for message in bodies[1]["messages"]] == ["be brief", "one", "answer 2", "two"]
    assert bodies[0]["temperature"] == 0 and bodies[0]["stream"] is True and "top_p" not in bodies[0]


def test_url_key_and_thinking(server, monkeypatch):
    url = f"http://127.0.0.1:{server.server_port}/v1/"
    argv = ("--url", url, "--api-key", "k", "--no-thinking", "--max-tokens", "7")
    assert chat(server, monkeypatch, "one\n", *argv) == 0
    ((body, authorization),) = server.seen
    assert (authorization, body["enable_thinking"], body["max_tokens"]) == ("Bearer k", False, 7)


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
    assert capsys.readouterr().err.endswith("/v1/chat/completions: the queue is full\n")


def test_no_server(monkeypatch, capsys):
    assert cli.main(["chat", "--p", "1"]) == 2
    assert capsys.readouterr().err == (
        "phalanx: no server answers at http://127.0.0.1:1/v1/models ([Errno 111] Connection refused); "
        "start one with `phalanx serve`\n"
    )


def test_options_of_the_server_in_a_shared_file_are_passed_over(server, monkeypatch, tmp_path, capsys):
    file = tmp_path / "phalanx.yaml"
    file.write_text("mem: 100\ntemperature: 0.5\n")
    monkeypatch.setenv("PHALANX_RANKS", "2")
    assert chat(server, monkeypatch, "one\n", "--config", str(file)) == 0
    assert server.seen[0][0]["temperature"] == 0.5
    assert capsys.readouterr().err == ""
    assert cli.main(["chat", "--tmperature", "1"]) == 2
    assert capsys.readouterr().err == "phalanx: unknown option --tmperature; did you mean --temperature?\n"
