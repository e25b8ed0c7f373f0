"""Tools of real servers: listed, called, and what happens where a server fails."""

import asyncio
import contextlib
import re

import pytest
from phalanx.rank.server.mcp import connection
from phalanx.rank.server.mcp.config import ToolServer
from phalanx.rank.server.mcp.tool_servers import ToolServers, full_name

from ....fields import each
from ...mcp_servers import STDIO, free_port, http_server, until

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def http_url():
    with http_server(free_port()) as url:
        yield url


@contextlib.asynccontextmanager
async def connected(*servers):
    found = ToolServers(list(servers))
    found.start()
    try:
        await found.settled(30)
        yield found
    finally:
        await found.close()


def local(**more):
    return ToolServer(name="local", **STDIO, **more)


def test_tools_of_both_kinds(http_url):
    async def run():
        async with connected(local(env={"SECRET": "s3"}), ToolServer(name="web", url=http_url)) as tools:
            assert each(tools.health().values(), "status") == ["ready", "ready"]
            names = set(tools.offered())
            assert {"local_add", "web_add", "local_fail"} <= names
            (add,) = [one for one in tools.functions() if one["function"]["name"] == "local_add"]
            assert add["function"]["description"] == "Add two numbers."
            assert set(add["function"]["parameters"]["properties"]) == {"a", "b"}
            results = [await tools.call(f"{name}_add", '{"a": 2, "b": 3}') for name in ("local", "web")]
            assert results == [("5", False)] * 2
            assert await tools.call("local_secret", "") == ("s3", False)
            for name, arguments, why in (
                ("local_fail", '{"why": "no luck"}', "no luck"),
                ("local_add", "[1", "no JSON object"),
                ("local_none", "{}", "there is no tool"),
                ("web_add", '{"a": "x"}', "a"),
            ):
                result = await tools.call(name, arguments)
                assert result.failed and why in result.text

    asyncio.run(run())


def test_a_call_that_takes_too_long(http_url):
    async def run():
        async with connected(ToolServer(name="web", url=http_url, timeout_secs=0.3)) as tools:
            slow, quick = await asyncio.gather(
                tools.call("web_slow", '{"seconds": 2}'), tools.call("web_add", '{"a": 1, "b": 1}')
            )
            assert slow.failed
            assert "within 0.3 s" in slow.text
            assert quick in (("2", False), slow._replace(text=quick.text))  # its threads may be busy with the other

    asyncio.run(run())


def test_a_dead_server_delays_nobody(monkeypatch):
    async def run():
        none = ToolServer(name="none", url=f"http://127.0.0.1:{free_port()}/mcp")
        missing = ToolServer(name="missing", command="/no/such/program")
        async with connected(local(), none, missing) as tools:
            health = tools.health()
            assert [health[name]["status"] for name in ("local", "none", "missing")] == ["ready", "failed", "failed"]
            assert "not found" in health["missing"]["message"] and health["none"]["message"]
            assert all(name.startswith("local_") for name in tools.offered())

    asyncio.run(run())


def test_a_server_that_ends_is_started_again(monkeypatch):
    monkeypatch.setattr(connection, "RETRY", (0.05, 0.1))

    async def run():
        async with connected(local()) as tools:
            assert (await tools.call("local_leave", "{}")).failed
            await until(lambda: not tools.offered())
            gone = await tools.connections["local"].call("add", {})
            assert gone.failed and "is not there" in gone.text
            await until(lambda: tools.offered())
            assert await tools.call("local_add", '{"a": 2, "b": 2}') == ("4", False)

    asyncio.run(run())


def test_a_server_that_comes_later(monkeypatch):
    monkeypatch.setattr(connection, "RETRY", (0.05, 0.1))

    async def run():
        port = free_port()
        async with connected(ToolServer(name="web", url=f"http://127.0.0.1:{port}/mcp")) as tools:
            assert tools.health()["web"]["status"] == "failed"
            with http_server(port):
                await until(lambda: tools.offered())

    asyncio.run(run())


def test_names_that_clients_take():
    assert full_name("my_files", "read") == "my_files_read"
    assert re.fullmatch(r"a-b_c_d_e_[0-9a-f]{6}", full_name("a-b", "c.d/e"))
    assert len(full_name("a" * 40, "b" * 60)) == 64


def test_no_two_tools_have_one_name():
    servers = ["a", "a_b", "a-b"]
    tools = ["b_c", "c", "c.d", "c_d", "x" * 70, "x" * 71]
    names = {full_name(server, tool, servers) for server in servers for tool in tools}
    assert len(names) == len(servers) * len(tools) and all(re.fullmatch(r"[\w-]{1,64}", name) for name in names)
    assert {"a_b_c", "a_c"} < names  # as long as nothing else could be meant, nothing is added


def test_a_server_that_does_not_let_go_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(connection, "CLOSE_TIMEOUT", 0.05)

    async def stuck():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()  # as a request that tells of the end, and is not answered

    async def run():
        one = connection.Connection(ToolServer(name="web", url="http://127.0.0.1:1/mcp"))
        monkeypatch.setattr(one, "_keep", stuck)
        one.start()
        await asyncio.sleep(0)
        await asyncio.wait_for(one.close(), 10)
        assert one._task.done()

    asyncio.run(run())
