"""Web pages of other servers, names that are not ours, and what a form can send."""

import json
import socket
import time

import pytest
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.config import ServerConfig
from phalanx.rank.server.http.access import Access
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
    """As nginx does with $host:$server_port behind TLS: the page is the server's own."""
    answer = fresh_server.request("GET", "/v1/models", headers={"Host": "localhost:443", "Origin": "https://localhost"})
    assert answer.status == 200
    answer = fresh_server.request("GET", "/v1/models", headers={"Host": "localhost:443", "Origin": "https://elsewhere"})
    assert answer.status == 403
