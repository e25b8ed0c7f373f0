"""Internals of Tornado that the server uses and Tornado's documents do not promise: newer versions must pass this."""

import ast
import configparser
import inspect
import re
import socket
from pathlib import Path

import pytest
import tornado
import tornado.http1connection
import tornado.httpserver
import tornado.iostream
import tornado.web
from phalanx.rank.server.http import connection, handler
from phalanx.rank.server.http.app import Application
from phalanx.rank.server.http.endpoint import Endpoint

pytestmark = pytest.mark.timeout(30)
ROOT = Path(connection.__file__).parents[3]
# Attributes without a promise, and the file of the server that reads them.
PRIVATE = {
    "_read_finished": "handler.py",  # of HTTP1Connection: the body has been read
    "_headers_written": "endpoint.py",  # of RequestHandler: the status is out
    "_read_regex": "connection.py",  # of BaseIOStream: a head is being read
    "_HandlerDelegate": "app.py",  # of tornado.web, a type
}
OWN = {  # a class here, and the files of Tornado's classes below it
    connection.Stream: (tornado.iostream,),
    connection.Server: (tornado.httpserver, tornado.tcpserver),
    Endpoint: (tornado.web,),
    Application: (tornado.web,),
}


def private_names(text):
    """Private names that a file uses of whatever it is: x._name, self._name."""
    names = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    return {name for name in names if is_private(name)}


def is_private(name):
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def own_names():
    """Private names that the files of the server define themselves."""
    found = set()
    for path in (ROOT / "rank/server/http").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def test_the_list_is_whole():
    modules = tornado.web, tornado.http1connection, tornado.iostream, tornado.httpserver, tornado.tcpserver
    theirs = {name for module in modules for name in re.findall(r"\b_[A-Za-z]\w*", inspect.getsource(module))}
    own = own_names()
    used = {
        (name, path.name)
        for path in (ROOT / "rank/server/http").glob("*.py")
        if "tornado" in (text := path.read_text())
        for name in private_names(text) & theirs - own
    }
    assert used == set(PRIVATE.items())


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_no_name_here_is_one_of_tornado_s(kind):
    """It would be overwritten, or overwrite."""
    here = {name for one in kind.__mro__ if one.__module__.startswith("phalanx") for name in vars(one)}
    here |= {name for one in kind.__mro__ if one.__module__.startswith("phalanx") for name in stored(one)}
    theirs = {name for module in OWN[kind] for name in re.findall(r"self\.(_[A-Za-z]\w*)", inspect.getsource(module))}
    assert not {name for name in here if is_private(name)} & theirs


def stored(kind):
    """The attributes that a class sets on itself."""
    return re.findall(r"self\.(_[A-Za-z]\w*)(?:: [^=\n]+)? = ", inspect.getsource(kind))


def test_the_version_is_bounded():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert "tornado>=6.4,<7" in setup["options"]["install_requires"].split()
    assert (6, 4) <= tornado.version_info[:2] < (7, 0)


def test_whether_a_body_has_been_read(start_server, monkeypatch):
    found = []
    original = handler.Handler.write_error

    def write_error(self, status, **more):
        found.append(self.request.connection._read_finished)
        original(self, status, **more)

    monkeypatch.setattr(handler.Handler, "write_error", write_error)
    server = start_server(api_keys=["right"])
    assert server.request("POST", "/v1/completions", b"{}").status == 401
    assert server.request("POST", "/v1/completions", b"{}", {"Expect": "100-continue"}).status == 401
    assert found == [True, False]


def test_whether_the_status_is_out(fresh_server, monkeypatch):
    found = []
    original = Endpoint._send

    def send(self, data):
        found.append(self._headers_written)
        return original(self, data)

    monkeypatch.setattr(Endpoint, "_send", send)
    fresh_server.events("completions", prompt="x", max_tokens=2)
    assert found[0] is False and set(found[1:]) == {True}


def test_whether_a_head_is_being_read(fresh_server):
    with socket.create_connection(("127.0.0.1", fresh_server.port), timeout=20) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
        fresh_server.wait(lambda: fresh_server.server._connections)
        (one,) = fresh_server.server._connections
        fresh_server.wait(lambda: one.stream._read_regex is not None)
        sock.sendall(b"ngth: 9\r\n\r\n{")
        fresh_server.wait(lambda: fresh_server.state.active and one.stream._read_regex is None)


def test_what_it_says_of_malformed_requests_and_large_bodies(fresh_server):
    """Words that are looked for, as there is no other sign: without them the answers would be Tornado's bare ones."""
    source = inspect.getsource(tornado.http1connection)
    assert connection.TOO_LARGE in source and repr(connection.BARE)[2:-1] in source
    for data, status in (
        (b"nonsense\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (1 << 40), 413),
    ):
        with socket.create_connection(("127.0.0.1", fresh_server.port), timeout=20) as sock:
            sock.sendall(data)
            head, _, body = sock.makefile("rb").read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status) and body.startswith(b'{"error"')


def test_reading_and_writing_go_through_what_is_overridden():
    """The methods are public; that the server's connections use these and no others is not written anywhere."""
    source = inspect.getsource(tornado.http1connection)
    reads = set(re.findall(r"self\.stream\.(read\w*)", source))
    assert reads == {"read_until_regex", "read_until", "read_bytes"}
    for name in ("write_to_fd", "read_from_fd", "close"):
        assert f"self.{name}(" in inspect.getsource(tornado.iostream)
