"""Tool servers for programs that block."""

import json

import pytest
from phalanx.launcher import tool_thread
from phalanx.launcher.tool_thread import ToolThread


@pytest.mark.timeout(30)
def test_a_server_that_has_not_answered_yet_is_named(tmp_path, monkeypatch):
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"slow": {"command": "cat"}}}))  # says nothing by itself
    monkeypatch.setattr(tool_thread, "CONNECT_TIMEOUT", 0.01)
    tools = ToolThread(str(path))
    try:
        assert list(tools.failed()) == ["slow"] and tools.failed()["slow"]
    finally:
        tools.close()
