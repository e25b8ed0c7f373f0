"""mcp.json: both shapes, and what is wrong in one."""

import importlib.util

import pytest
from phalanx.rank.server.mcp.config import read

from ...mcp_servers import written


def test_servers_by_name(tmp_path):
    content = {
        "mcpServers": {
            "files": {"command": "files", "args": ["-v"], "env": {"A": "b"}},
            "web": {"type": "http", "url": "http://localhost:3000/mcp", "headers": {"X": "y"}},
            "off": {"command": "x", "disabled": True},
        }
    }
    files, web = read(written(tmp_path, content))
    assert (files.name, files.command, files.args, files.env, files.timeout_secs) == (
        "files", "files", ["-v"], {"A": "b"}, 30,
    )  # fmt: skip
    assert (web.url, web.sent_headers()) == ("http://localhost:3000/mcp", {"X": "y"})


def test_a_list_of_servers(tmp_path):
    entry = {"name": "web", "url": "https://a.b/mcp", "auth": "T", "timeout_secs": 5, "instructions": "i"}
    (web,) = read(written(tmp_path, {"servers": [entry]}))
    assert web.sent_headers() == {"Authorization": "Bearer T"} and web.timeout_secs == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"mcpServers": {"a": {"command": "x", "more": ' + "[" * 100_000, "nested"),
        ({}, "it names no server"),
        ({"mcpServers": {"a b": {"command": "x"}}}, "server 'a b': a name has"),
        ({"mcpServers": {"a": {}}}, "either `command` or `url` is needed"),
        ({"mcpServers": {"a": {"url": "ftp://x"}}}, "must begin with http://"),
        ({"mcpServers": {"a": {"url": "http://x", "type": "sse"}}}, "type is 'sse'"),
        ({"mcpServers": {"a": {"command": 1}}}, "Expected `str`"),
        ({"mcpServers": {"a": {"command": "x", "timeout_secs": 0}}}, "timeout_secs is 0"),
        ({"mcpServers": {"a": {"command": "x"}}, "servers": [{"name": "a", "command": "y"}]}, "'a' is there twice"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read(written(tmp_path, content))


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read(str(tmp_path / "none"))


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'phalanx\[mcp\]'"):
        read(written(tmp_path, {"mcpServers": {"a": {"command": "x"}}}))
