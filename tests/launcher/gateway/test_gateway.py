"""The gateway: which job gets a request, what is sent again, and what a client sees when jobs come, end and fail."""

import asyncio
import functools
import gzip
import json
import re
import threading
from pathlib import Path

import phalanx
import pytest
from phalanx.launcher.gateway import app, job_table
from phalanx.launcher.gateway.app import LOST
from phalanx.launcher.gateway.job_table import SPREAD
from phalanx.rank.server import otel, server_registry, tracing
from phalanx.rank.server.api_error import NOT_TAKEN

from ...collector import Collector
from ...fields import each
from .site import Site, begin_stream, chunk, read, read_head, whole

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello!"}]}


@pytest.fixture
def place(tmp_path):
    return tmp_path / "jobs"


def in_loop(scenario):
    """Run a test that is a coroutine, which has half a minute."""

    @functools.wraps(scenario)
    def run(**given):
        async def bounded():
            async with asyncio.timeout(30):
                await scenario(**given)

        asyncio.run(bounded())

    return run


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def refuse(request, writer):
    await whole("503 Service Unavailable", {"error": {}}, writer, f"{NOT_TAKEN}: draining\r\n")


@in_loop
async def test_a_request_and_its_answer_are_passed_on_as_they_are(place):
    async def answer(request, writer):
        more = "X-Request-Id: 7\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nServer: phalanx\r\nKeep-Alive: x\r\n"
        await whole("201 Created", {"a": 1}, writer, more)

    async with Site(place) as site:
        job = await site.job("one", answer)
        got = await site.ask(CHAT, "/v1/chat/completions?x=%2e", Authorization="Bearer KEY", X_Request_Id="7", TE="x")
        (request,) = job.requests
        assert (request.method, request.target) == ("POST", "/v1/chat/completions?x=%2e")
        assert json.loads(request.body) == CHAT
        assert request.headers["authorization"] == "Bearer KEY" and request.headers["host"] == "gateway.site:80"
        assert "te" not in request.headers
        assert (got.status, got.json, got.headers["server"]) == (201, {"a": 1}, "phalanx")
        assert got.headers["set-cookie"] == "b=2" and "keep-alive" not in got.headers
        for method in ("DELETE", "HEAD", "OPTIONS", "PUT"):
            await site.ask(None, "/v1/files/x", method)
            assert job.requests[-1].method == method


@in_loop
async def test_a_stream_is_passed_on_as_it_comes(place):
    go_on = asyncio.Event()

    async def answer(request, writer):
        await begin_stream(writer)
        writer.write(chunk(b"data: 1\n\n"))
        await go_on.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with Site(place) as site:
        await site.job("one", answer)
        async with site.connection() as (reader, writer):
            await site.send(writer, CHAT)
            await read_head(reader)
            assert b"data: 1\n" in [await reader.readline(), await reader.readline()]
            go_on.set()
            rest = await reader.read()
            assert b"[DONE]" in rest and rest.endswith(b"0\r\n\r\n")


@in_loop
async def test_a_client_that_leaves_ends_the_request_at_the_job(place):
    begun = asyncio.Event()

    async def answer(request, writer):
        await begin_stream(writer)
        writer.write(chunk(b"data: 1\n\n"))
        begun.set()
        await asyncio.Event().wait()

    async with Site(place) as site:
        job = await site.job("one", answer)
        for head in (True, False):  # also before the answer has begun
            begun.clear()
            async with site.connection() as (reader, writer):
                await site.send(writer, CHAT)
                if head:
                    await read_head(reader)
                else:
                    await begun.wait()
            await until(lambda: job.left)
            job.left = 0
        await until(lambda: not site.gateway.open)
        assert all(one.open == 0 for one in site.table.jobs.values())


@in_loop
async def test_a_client_that_does_not_read_holds_its_job_up(place):
    """Back-pressure: the gateway reads no more from the job than the client takes and buffers hold."""
    sent = 0

    async def answer(request, writer):
        nonlocal sent
        await begin_stream(writer)
        while sent < 64 << 20:
            writer.write(chunk(b"x" * 65536))
            await writer.drain()
            sent += 65536

    async with Site(place) as site:
        await site.job("one", answer)
        async with site.connection() as (reader, writer):
            writer.transport.pause_reading()
            await site.send(writer, CHAT)
            before = -1
            while before != sent or not sent:
                before = sent
                await asyncio.sleep(0.3)  # 0.3 s: long enough for a gateway that does not wait to read on
            assert sent < 32 << 20


@in_loop
async def test_requests_wait_for_a_job(place):
    async with Site(place) as site:
        waiting = asyncio.ensure_future(site.ask(CHAT))
        await until(lambda: site.gateway.open)
        job = await site.job("one", state="starting")
        await asyncio.sleep(0.2)  # for a gateway that would send it although the job is not ready
        assert not waiting.done() and not job.requests
        health = await site.ask(path="/health")
        assert health.status == 503 and health.json["models"] == {"m": {"starting": 1}}
        job.say(state="ready")
        assert (await waiting).json == {"job": "one"}
        assert (await site.ask(path="/health")).status == 200


@in_loop
async def test_a_request_is_held_only_so_long(place):
    async with Site(place, hold=0.2) as site:
        got = await site.ask(CHAT)
        assert got.status == 503 and got.json["error"]["code"] == "no_job" and int(got.headers["retry-after"]) > 0
        got = await site.ask(CHAT, "/v1/messages", Anthropic_Version="2023-06-01")
        assert got.status == 503 and got.json["error"]["type"] == "overloaded_error"
        await site.job("one", refuse)
        got = await site.ask(CHAT)
        assert got.status == 503 and got.json["error"]["code"] == "no_job"


@in_loop
async def test_what_a_job_does_not_take_goes_to_another(place):
    async with Site(place) as site:
        old = await site.job("old", refuse)
        waiting = asyncio.ensure_future(site.ask(CHAT))
        await until(lambda: old.requests)
        new = await site.job("new")
        assert (await waiting).json == {"job": "new"}
        assert [one.body for one in new.requests] == [old.requests[0].body]


@in_loop
async def test_a_job_that_cannot_be_reached_is_passed_over_until_it_answers_again(place):
    async with Site(place) as site:
        dead = await site.job("dead")
        dead.kill()
        await site.job("alive")
        for number in range(6):  # prefixes of both
            got = await site.ask({"messages": [{"role": "user", "content": str(number)}]})
            assert got.json == {"job": "alive"}
        await until(lambda: site.table.jobs["dead"].ejected)
        await dead.open()
        await until(lambda: site.table.jobs["dead"].ready)


@in_loop
async def test_a_job_whose_health_fails_is_ejected(place):
    async with Site(place) as site:
        sick, well = await site.job("sick"), await site.job("well")
        sick.healthy = False
        site.table.jobs["sick"].probed = 0
        await until(lambda: site.table.jobs["sick"].ejected)
        before = len(sick.requests)
        for number in range(6):
            assert (await site.ask({"messages": [{"role": "user", "content": str(number)}]})).json == {"job": "well"}
        assert len(sick.requests) == before and len(well.requests) >= 6
        first = site.table.jobs["sick"].failures
        await until(lambda: site.table.jobs["sick"].failures > first)  # tried again, later each time
        sick.healthy = True
        await until(lambda: site.table.jobs["sick"].ready)


@pytest.mark.parametrize(
    "path, event",
    [
        ("/v1/chat/completions", b"data: {"),
        ("/v1/messages", b"event: error\ndata: {"),
        ("/v1/responses", b"event: error\ndata: {"),
    ],
)
@in_loop
async def test_a_stream_whose_job_ends_gets_an_error_that_says_to_send_it_again(place, path, event):
    async def answer(request, writer):
        await begin_stream(writer)
        writer.write(chunk(b"data: 1\n\n"))
        writer.write(chunk(b"data: half of an ev"))
        await writer.drain()

    async with Site(place) as site:
        job = await site.job("one", answer)
        got = await site.ask(CHAT, path)
        assert got.status == 200 and got.whole
        *_, last, rest = got.body.split(b"\n\n")
        assert not rest and last.startswith(event)
        assert b"job_lost" in last or b"api_error" in last
        assert b"again" in last and len(job.requests) == 1


@in_loop
async def test_a_request_that_a_job_has_had_is_not_sent_again(place):
    async def answer(request, writer):
        writer.write(b"HTTP/1.1 200")  # and ends

    async with Site(place) as site:
        jobs = [await site.job("one", answer), await site.job("two", answer)]
        got = await site.ask(CHAT)
        assert got.status == 502 and got.json["error"]["code"] == "job_lost" and LOST in got.json["error"]["message"]
        assert sum(len(job.requests) for job in jobs) == 1


@in_loop
async def test_an_answer_that_breaks_off_is_not_whole_for_the_client_either(place):
    async def answer(request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()

    async with Site(place) as site:
        await site.job("one", answer)
        got = await site.ask(CHAT)
        assert got.status == 200 and not got.whole


@in_loop
async def test_equal_beginnings_go_to_the_same_job_and_load_is_spread(place):
    async with Site(place) as site:
        for name in "abc":
            await site.job(name)

        def turn(user, more=()):
            first = [{"role": "system", "content": "s" * 9000}, {"role": "user", "content": user}]
            return {"model": "m", "messages": [*first, *more]}

        chosen = {}
        for user in map(str, range(24)):
            chosen[user] = (await site.ask(turn(user))).json["job"]
            again = await site.ask(
                turn(user, [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}])
            )
            assert again.json["job"] == chosen[user]
        assert set(chosen.values()) == {"a", "b", "c"}
        # One prefix alone: its job gets a few more than the others, and no more.
        open_now = [site.table.choose("m", b"one") for _ in range(1)]
        for _ in range(29):
            open_now[-1].open += 1
            open_now.append(site.table.choose("m", b"one"))
        counts = sorted(open_now.count(one) for one in set(open_now))
        assert len(counts) == 3 and counts[-1] <= SPREAD * 10 + 1
        site.table.jobs["a"].server.load = 1000  # as its file says: another gateway's
        for one in site.table.jobs.values():
            one.open = 0
        assert all(site.table.choose("m", str(n).encode()).name != "a" for n in range(20))


@in_loop
async def test_a_request_goes_to_a_job_of_its_model(place):
    async with Site(place, hold=0.3) as site:
        await site.job("one")
        assert (await site.ask({"model": "anything", "prompt": "x"})).json == {"job": "one"}  # the job decides
        await site.job("two", model="big", models=["big", "large"])
        assert (await site.ask({"model": "large", "prompt": "x"})).json == {"job": "two"}
        packed = gzip.compress(json.dumps({"model": "big", "prompt": "x"}).encode())
        assert (await site.ask(packed, Content_Encoding="gzip")).json == {"job": "two"}
        assert (await site.ask(CHAT)).json == {"job": "one"}
        got = await site.ask({"model": "none", "prompt": "x"})
        assert got.status == 404 and got.json["error"]["code"] == "model_not_found"
        await site.jobs[1].close()
        await until(lambda: "two" not in site.table.jobs)
        got = await site.ask({"model": "big", "prompt": "x"})  # it may come again
        assert got.status == 503 and got.json["error"]["code"] == "no_job"


@in_loop
async def test_the_models_of_all_jobs_are_listed(place):
    def listing(name):
        async def answer(request, writer):
            if request.headers.get("authorization") != "Bearer k":
                return await whole("401 Unauthorized", {"error": {"code": "invalid_api_key"}}, writer)
            await whole("200 OK", {"object": "list", "data": [{"id": name}]}, writer)

        return answer

    async with Site(place) as site:
        await site.job("one", listing("m"))
        await site.job("two", listing("big"), model="big", models=["big"])
        for body in (None, {"with": "a body"}):
            got = await site.ask(body, "/v1/models", "GET", Authorization="Bearer k")
            assert got.status == 200 and all(not job.requests[-1].body for job in site.jobs)
        assert sorted(each(got.json["data"], "id")) == ["big", "m"]
        assert (await site.ask(path="/v1/models")).status == 401


@in_loop
async def test_a_model_that_no_job_has_for_long_is_forgotten(place, monkeypatch):
    async with Site(place, hold=0.2) as site:
        await site.job("one")
        await site.job("two", model="big", models=["big"])
        await site.jobs[1].close()
        await until(lambda: "two" not in site.table.jobs)
        monkeypatch.setattr(job_table, "FORGET", 0.0)
        await until(lambda: "big" not in site.table.known)
        assert site.table.known.keys() == {"m"} and site.table.may_come("m")
        got = await site.ask({"model": "big", "prompt": "x"})  # the only job is asked: it decides
        assert got.json == {"job": "one"}
        await site.job("three", model="other", models=["other"])
        got = await site.ask({"model": "big", "prompt": "x"})
        assert got.status == 404 and got.json["error"]["code"] == "model_not_found"


@in_loop
async def test_a_home_that_hangs_stops_no_probe(place, monkeypatch):
    hangs, go_on, real = threading.Event(), threading.Event(), server_registry.running

    def running(*given):
        if hangs.is_set():
            assert go_on.wait(30)
        return real(*given)

    async with Site(place) as site:
        job = await site.job("one")
        await until(lambda: site.table.jobs["one"].probed)
        monkeypatch.setattr(server_registry, "running", running)
        hangs.set()
        try:
            job.kill()
            site.table.jobs["one"].probed = 0
            await until(lambda: site.table.jobs["one"].ejected)
        finally:
            go_on.set()


@in_loop
async def test_a_probe_without_an_answer_says_so(place, monkeypatch, caplog):
    async def silent(*given):
        raise TimeoutError

    async with Site(place) as site:
        await site.job("one")
        monkeypatch.setattr(app.upstream, "fetch", silent)
        site.table.jobs["one"].probed = 0
        await until(lambda: site.table.jobs["one"].ejected)
    assert any("/health" in one.getMessage() for one in caplog.records)


@in_loop
async def test_only_addresses_of_the_registry_are_asked(place):
    """Requests name anything: a target with a host of its own, a Host, a path that looks like one."""
    other = []

    async def stranger(reader, writer):
        other.append(await reader.read(100))
        writer.close()

    async with Site(place) as site:
        job = await site.job("one")
        server = await asyncio.start_server(stranger, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for path in (f"http://127.0.0.1:{port}/v1/models", f"//127.0.0.1:{port}/", f"@127.0.0.1:{port}/"):
            got = await site.ask(path=path, Host=f"127.0.0.1:{port}", X_Forwarded_Host=f"127.0.0.1:{port}")
            assert got.status in (200, 400)
        assert not other and all(one.target.startswith("/") for one in job.requests)
        server.close()


@in_loop
async def test_files_that_others_could_have_written_and_odd_addresses_are_passed_over(place):
    async with Site(place, hold=0.2) as site:
        job = await site.job("one")
        job.path.chmod(0o666)
        await site.table.refresh()
        assert (await site.ask(CHAT)).status == 503
        job.say()
        for url in ("ftp://127.0.0.1:21", "http://127.0.0.1", "gopher://x:70", ""):
            job.say(url=url)
            await site.table.refresh()
            assert (await site.ask(CHAT)).status == 503
        job.say(url=f"http://127.0.0.1:{job.port}", host="another-host")  # its loopback is not ours
        await site.table.refresh()
        assert (await site.ask(CHAT)).status == 503
        assert not job.requests


@in_loop
async def test_a_job_without_a_key_is_not_opened_to_other_machines(place):
    async with Site(place, hold=0.2, open_to_all=True) as site:
        assert (await site.ask(path="/metrics")).status == 401
        await site.job("open")
        assert (await site.ask(CHAT)).status == 503
        await site.job("keyed", key="secret")
        assert (await site.ask(CHAT)).json == {"job": "keyed"}


@in_loop
async def test_bodies_are_bounded(place, monkeypatch):
    monkeypatch.setattr(app, "MAX_BODY", 1000)
    monkeypatch.setattr(app, "MAX_FILE", 100_000)
    async with Site(place) as site:
        job = await site.job("one")
        site.gateway.bodies.total = site.gateway.bodies.quota = 1500
        assert (await site.ask(b"x" * 900)).status == 200
        assert (await site.ask(b"x" * 50_000, "/v1/files")).status == 200  # an upload: passed on as it comes
        assert len(job.requests[-1].body) == 50_000
        async with site.connection() as (reader, writer):
            writer.write(b"POST /v1/files HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999\r\n\r\n")
            assert (await read_head(reader)).status == 413
        async with site.connection() as (reader, writer):
            head = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            writer.write(head + chunk(b"x" * 1200) + b"0\r\n\r\n")
            assert (await read(reader)).status == 413
        async with site.connection() as (_, writer):  # half a body holds its bytes
            writer.write(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 950\r\n\r\n" + b"x" * 900)
            await until(lambda: site.gateway.bodies.held("this machine") == 900)
            got = await site.ask(b"x" * 700)
            assert got.status == 429 and got.json["error"]["code"] == "busy"
        await until(lambda: site.gateway.bodies.held("this machine") == 0)
        assert (await site.ask(b"x" * 700)).status == 200


@in_loop
async def test_figures_and_health_are_the_gateways_own(place):
    async with Site(place) as site:
        await site.job("one", key="secret")
        await site.ask(CHAT)
        assert (await site.ask(path="/health")).json == {"status": "ready", "models": {"m": {"ready": 1}}}
        assert (await site.ask(path="/metrics")).status == 401
        got = await site.ask(path="/metrics", Authorization="Bearer secret")
        text = got.body.decode()
        assert 'phalanx_gateway_jobs{model="m",state="ready"} 1.0' in text
        assert 'phalanx_gateway_requests_total{outcome="answered"} 1.0' in text
        assert len(site.jobs[0].requests) == 1
        await site.jobs[0].close()
        await until(lambda: not site.table.jobs)
        assert (await site.ask(path="/metrics")).status == 401  # jobs that come and go do not open it
        assert (await site.ask(path="/metrics", Authorization="Bearer secret")).status == 200
        page = (Path(phalanx.__file__).parent / "docs" / "monitoring.md").read_text()
        told = set(re.findall(r"`(phalanx_gateway_\w+)`", page))
        assert told == {name for name in re.findall(r"^# TYPE (\S+)", text, re.M) if not name.endswith("_created")}


@in_loop
async def test_many_at_once(place):
    """Every request has one answer, while jobs come and go."""

    async def slow(request, writer):
        await begin_stream(writer)
        for number in range(5):
            writer.write(chunk(b"data: %d\n\n" % number))
            await asyncio.sleep(0.01)
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with Site(place) as site:
        jobs = [await site.job(name, slow) for name in "ab"]

        async def client(number):
            return [await site.ask({"messages": [{"role": "user", "content": str(number)}]}) for _ in range(5)]

        clients = asyncio.gather(*(client(number) for number in range(20)))
        await until(lambda: len(jobs[0].requests) > 5)
        jobs[0].say(state="draining")
        await site.job("c", slow)
        answers = [one for some in await clients for one in some]
        assert len(answers) == 100 and all(one.status == 200 and one.body.endswith(b"[DONE]\n\n") for one in answers)
        assert not site.gateway.open and all(job.open == 0 for job in site.table.jobs.values())


@in_loop
async def test_a_trace_goes_through_the_gateway(place, monkeypatch):
    monkeypatch.setattr(otel, "EVERY", 0.02)
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    sent = {"Traceparent": f"00-{trace}-{parent}-01", "Tracestate": "vendor=1"}
    with Collector() as collector:
        async with Site(place) as site:
            job = await site.job("one")
            await site.ask(CHAT, **sent)
            assert job.requests[-1].headers.items() >= {name.lower(): value for name, value in sent.items()}.items()
            site.gateway.tracing = tracing.start(collector.url, "phalanx-gateway")
            await site.ask(CHAT, **sent)
            passed = job.requests[-1].headers
            assert passed["tracestate"] == "vendor=1"
            job.say(state="draining")
            await site.table.refresh()
            waiting = asyncio.ensure_future(site.ask(CHAT))
            await until(lambda: site.gateway.metrics.waiting._value.get())
            job.say(state="ready")
            assert (await waiting).status == 200
            (one, other) = await asyncio.to_thread(collector.named, "gateway POST", 2)
            assert (one.trace, one.parent, one.service) == (trace, parent, "phalanx-gateway")
            assert passed["traceparent"] == f"00-{trace}-{one.id}-01"
            assert one.attributes.items() >= {"phalanx.job": "one", "http.response.status_code": 200}.items()
            (wait,) = await asyncio.to_thread(collector.named, "wait for a job")
            assert wait.parent == other.id and other.parent == ""
            await site.gateway.tracing.export.close(5)
