"""Web pages of other servers, names that are not ours, and what a form can send."""

import json
import os
import socket
import time

import pytest
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.config import ServerConfig
from phalanx.rank.server.http import handler
from phalanx.rank.server.http.access import PROBES, Access
from phalanx.rank.server.http.routes import paths
from tornado.httputil import HTTPHeaders, HTTPServerRequest, RequestStartLine

pytestmark = pytest.mark.timeout(30)
CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": "hi"})
PAGE = "http://page.example:3000"


def access(**options):
    return Access(ServerConfig(model_dir="m", link="l", listen_fd=-1, **options))


def refused(found, address=("127.0.0.1", 2000), host="localhost:2000", **headers):
    """The code of the refusal, "" for none."""
    request = HTTPServerRequest(
        start_line=RequestStartLine("POST", CHAT, "HTTP/1.1"), headers=HTTPHeaders({"Host": host, **headers})
    )
    try:
        found.check(request, address)
    except ApiError as error:
        assert error.status == 403 and "--allowed-" in error.message
        return error.code
    return ""


def test_a_page_of_another_server_is_refused(fresh_server):
    for method, body in (("POST", BODY), ("OPTIONS", None), ("GET", None)):
        path = "/v1/models" if method == "GET" else CHAT
        answer = fresh_server.request(method, path, body, {"Origin": PAGE, "Content-Type": "application/json"})
        assert answer.status == 403 and answer.body["error"]["code"] == "origin_not_allowed"
        assert "--allowed-origins http://page.example:3000" in answer.body["error"]["message"]
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert not fresh_server.scheduler.requests
    plain = fresh_server.request("POST", CHAT, BODY)
    assert plain.status == 200 and "Access-Control-Allow-Origin" not in plain.headers


@pytest.mark.parametrize("origin", ["null", "http://localhost:3000", "https://evil.example", "http://127.0.0.1"])
def test_origins_of_others(origin):
    assert refused(access(), Origin=origin) == "origin_not_allowed"
    assert refused(access(api_keys=["k"]), Origin=origin) == "origin_not_allowed"


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:2000", "http://localhost:2000"),
        ("[::1]:2000", "http://[::1]:2000"),
        ("10.0.0.1", "https://10.0.0.1"),
    ],
)
def test_a_page_of_the_server_itself(host, origin):
    assert refused(access(), host=host, Origin=origin) == ""


def test_allowed_origins(start_server):
    server = start_server(allowed_origins=[PAGE, "http://other.example/"])
    asked = server.request("OPTIONS", CHAT, headers={"Origin": PAGE, "Access-Control-Request-Method": "POST"})
    assert asked.status == 204 and asked.headers["Access-Control-Allow-Methods"] == "POST, OPTIONS"
    assert "Authorization" in asked.headers["Access-Control-Allow-Headers"]
    answer = server.request("POST", CHAT, BODY, {"Origin": PAGE})
    broken = server.request("POST", CHAT, "{", {"Origin": PAGE})
    assert (answer.status, broken.status) == (200, 400)
    assert "retry-after" in broken.headers["Access-Control-Expose-Headers"]
    for one in (asked, answer, broken):
        assert one.headers["Access-Control-Allow-Origin"] == PAGE and one.headers["Vary"] == "Origin"
    assert server.request("POST", CHAT, BODY, {"Origin": "http://other.example"}).status == 200
    assert server.request("POST", CHAT, BODY, {"Origin": "http://third.example"}).status == 403
    assert server.request("GET", "/health").headers["Vary"] == "Origin"


def test_a_stream_to_an_allowed_page(start_server):
    server = start_server(allowed_origins=["*"], api_keys=["k"])
    headers = {"Origin": PAGE, "Authorization": "Bearer k"}
    answer = server.request("POST", CHAT, json.dumps({"messages": "hi", "stream": True}), headers)
    assert answer.status == 200 and answer.headers["Access-Control-Allow-Origin"] == "*"
    assert server.request("OPTIONS", CHAT, headers={"Origin": PAGE}).status == 204  # a preflight brings no key
    assert server.request("POST", CHAT, BODY, {"Origin": PAGE}).status == 401


OURS = ["localhost", "LOCALHOST:2000", "localhost.", "a.localhost", "127.0.0.1:2000", "[::1]:2000", "10.1.2.3:80"]
OTHERS = ["evil.example", "evil.example:2000", "localhost.evil.example", "127.0.0.1.evil.example", "node7.site.example"]


@pytest.mark.parametrize("host", [*OURS, socket.gethostname()])
def test_names_of_this_server(host):
    assert refused(access(), host=host) == ""


@pytest.mark.parametrize("host", OTHERS)
@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "10.0.0.1"])
def test_names_of_others(host, address):
    assert refused(access(), (address, 2000), host) == "host_not_allowed"
    assert refused(access(allowed_hosts=["*"]), (address, 2000), host) == ""
    assert refused(access(api_keys=["k"]), (address, 2000), host) == ""
    assert refused(access(), "/run/socket", host) == ""


def test_names_that_no_public_server_has():
    """Other nodes and containers use them, so they are taken where other machines come in."""
    for host in ("node7-ib0", "phalanx", "phalanx.default.svc.cluster.local"):
        assert refused(access(), ("10.0.0.1", 2000), host) == ""
        assert refused(access(), ("127.0.0.1", 2000), host) == "host_not_allowed"


def test_allowed_hosts():
    found = access(allowed_hosts=["llm.site.example", "*.cluster.example"])
    assert [refused(found, host=host) for host in ("LLM.site.example:80", "a.cluster.example")] == ["", ""]
    assert refused(found, host="cluster.example.evil.example") == "host_not_allowed"


def test_the_full_name(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: "Node7.site.example")
    found, until = access(), time.monotonic() + 10
    while refused(found, host="node7.site.example"):  # it is looked up beside
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_names_of_the_address_it_listens_on(monkeypatch):
    def look_up(address):
        if address != "10.1.2.3":
            raise socket.herror(1, "Unknown host")
        return "Node7-ib.site.example", ["llm.site.example.", "*"], [address]

    monkeypatch.setattr(socket, "gethostbyaddr", look_up)
    found, until = access(url="http://10.1.2.3:2000/v1"), time.monotonic() + 10
    while refused(found, host="llm.site.example"):  # they are looked up beside
        assert time.monotonic() < until
        time.sleep(0.01)
    assert refused(found, host="node7-ib.site.example:2000") == ""
    assert refused(found, host="evil.example") == "host_not_allowed"
    assert refused(access(url="http://10.1.2.4:2000/v1"), host="llm.site.example") == "host_not_allowed"


def test_a_probe_may_use_any_name(fresh_server):
    for path in ("/health", "/v1/health", "/ready", "/ping"):
        assert fresh_server.request("GET", path, headers={"Host": "probe.example"}).status == 200


def test_a_foreign_host_over_http(fresh_server):
    answer = fresh_server.request("POST", CHAT, BODY, {"Host": "evil.example"})
    assert answer.status == 403 and answer.body["error"]["type"] == "permission_error"
    assert "--allowed-hosts evil.example" in answer.body["error"]["message"]
    assert fresh_server.request("GET", "/v1/models", headers={"Host": "evil.example"}).status == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_what_a_form_sends_is_refused(fresh_server, kind):
    for path in (CHAT, "/v1/completions", "/v1/embeddings"):
        answer = fresh_server.request("POST", path, BODY, {"Content-Type": kind})
        assert answer.status == 415 and "Content-Type: application/json" in answer.body["error"]["message"]
    assert not fresh_server.scheduler.requests


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "", None])
def test_json_is_taken(fresh_server, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    assert fresh_server.request("POST", CHAT, BODY, headers).status == 200


def test_a_request_without_a_host_name_is_no_web_page(fresh_server):
    """Probes send an empty one; browsers cannot."""
    with socket.create_connection(("127.0.0.1", fresh_server.port)) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_proxy_may_name_the_usual_port(fresh_server):
    """Headers as nginx sets them with $host:$server_port behind TLS: the page is the server's own."""
    answer = fresh_server.request("GET", "/v1/models", headers={"Host": "localhost:443", "Origin": "https://localhost"})
    assert answer.status == 200
    answer = fresh_server.request("GET", "/v1/models", headers={"Host": "localhost:443", "Origin": "https://elsewhere"})
    assert answer.status == 403


def test_who_has_no_key_is_told_nothing(start_server):
    server = start_server(api_keys=["right"])
    public = set()
    for path, methods in paths().items():
        for method in methods:
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                if server.request(method, path.replace("{", "").replace("}", ""), headers=headers).status != 401:
                    public.add(path)
    assert public == {"/", "/ui/{file}", "/ui/vendor/{file}", "/docs", "/openapi.json", *PROBES}
    for path in ("/metrics", "/load", "/version", "/v1/models", "/v1/usage"):
        assert server.request("GET", path, headers={"Authorization": "Bearer right"}).status == 200


def test_every_key_is_compared_in_constant_time(start_server, monkeypatch):
    """With all keys that there are, whether one fits or not."""
    server = start_server(api_keys=["one", "two", "three"])
    compared, counts = [], []

    def compare(sent, key):
        compared.append(key)
        return sent == key

    monkeypatch.setattr(handler.hmac, "compare_digest", compare)
    for key, status in (("one", 200), ("wrong", 401), ("three", 200)):
        assert server.request("GET", "/v1/models", headers={"X-Api-Key": key}).status == status
        counts.append((len(compared), len(set(compared))))
        compared.clear()
    assert set(counts) == {(6, 3)}  # the header names the key, and may be all of it


@pytest.fixture
def canaries(tmp_path):
    """A URL and a file that nothing may open; whoever read the file would wait for ever."""
    path = tmp_path / "canary"
    os.mkfifo(path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/x", str(path)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    with pytest.raises(OSError):
        os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # where one reads it, this succeeds


@pytest.mark.parametrize("kind", ["a URL", "a file", "a file's URL"])
def test_nothing_that_a_request_names_is_opened(fresh_server, canaries, kind):
    url, path = canaries
    name = {"a URL": url, "a file": path, "a file's URL": f"file://{path}"}[kind]
    parts = [
        {"type": "image_url", "image_url": {"url": name}},
        {"type": "input_image", "image_url": name},
        {"type": "input_file", "file_url": name},
        {"type": "file", "file": {"file_id": name, "filename": name}},
        {"type": "image", "source": {"type": "url", "url": name}},
        {"type": "document", "source": {"type": "url", "url": name}},
        {"type": "audio_url", "audio_url": {"url": name}},
        {"type": "text", "text": f"![x]({name}) <img src={name}>"},
    ]
    tools = [
        {"type": "mcp", "server_label": "x", "server_url": name, "require_approval": "never"},
        {"type": "function", "function": {"name": "f", "parameters": {"$ref": name}}},
        {"type": "web_search", "search_context_size": name},
        {"type": "file_search", "vector_store_ids": [name]},
    ]
    fields = [
        {"model": name},
        {"chat_template": name},
        {"guided_json": {"$ref": name}},
        {"guided_grammar": f"%import {name}"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": name}}}},
        {"metadata": {"url": name}},
        {"lora": name},
        {"previous_response_id": name},
        {"prompt_cache_key": name},
        {"cache_salt": name},
        *({"tools": [tool], "tool_choice": "auto"} for tool in tools),
    ]
    message = [{"role": "user", "content": "hi"}]
    for more in [*fields, *({"messages": [{"role": "user", "content": [part]}]} for part in parts)]:
        asked = {"messages": message, "max_tokens": 2, **more}
        assert fresh_server.post("chat/completions", **asked).status in (200, 400, 404)
        assert fresh_server.post("messages", **asked).status in (200, 400, 404)
        rest = {name: value for name, value in asked.items() if name != "messages"}
        del rest["max_tokens"]
        assert fresh_server.post("responses", input=asked["messages"], **rest).status in (200, 400, 404)
        assert fresh_server.post("completions", prompt="x", **rest).status in (200, 400, 404)
    assert fresh_server.post("embeddings", input=name).status == 200
    assert fresh_server.request("POST", "/tokenize", {"prompt": name}).status == 200


def test_health_tells_the_state_without_a_key(start_server):
    server = start_server(api_keys=["right"])
    for path in PROBES:
        assert server.request("GET", path).body in ({"status": "ready"}, b"")
    known = server.request("GET", "/health", headers={"X-Api-Key": "right"})
    assert known.body == {"status": "ready", "running": 0, "waiting": 0}


def test_health_tells_nothing_of_a_failure_without_a_key(start_server):
    server = start_server(api_keys=["right"], connect=False)
    assert server.request("GET", "/health").body == {"status": "loading"}
    assert "progress" in server.request("GET", "/health", headers={"X-Api-Key": "right"}).body


def test_without_keys_everybody_is_told(fresh_server):
    assert fresh_server.request("GET", "/metrics").status == 200
    assert "running" in fresh_server.request("GET", "/health").body
