"""Spans of requests: what they say, whose trace they belong to, and that a collector that fails costs nothing."""

import asyncio
import contextlib
import http.client
import json
import threading
import time
from types import SimpleNamespace

import pytest
from phalanx.rank import protocol
from phalanx.rank.server import otel, tracing
from phalanx.rank.server.http import spans

from .... import retries
from ....collector import Collector
from ...mcp_servers import STDIO, written

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SERVER, CLIENT = 2, 3  # kinds of spans
CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(otel, "EVERY", 0.02)


@pytest.fixture
def collector():
    with Collector() as running:
        yield running


@pytest.fixture
def traced(start_server, collector):
    return start_server(otlp_endpoint=collector.url)


def parent(flags="01"):
    return {"Traceparent": f"00-{TRACE}-{PARENT}-{flags}", "Tracestate": "vendor=1"}


def test_a_chat_has_its_spans(traced, collector):
    body = {**CHAT, "temperature": 0.5, "seed": 7}
    answer = traced.request("POST", "/v1/chat/completions", body, parent())
    (one,) = collector.named("POST /v1/chat/completions")
    assert (one.trace, one.parent, one.kind, one.failed, one.state) == (TRACE, PARENT, SERVER, False, "vendor=1")
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{one.id}-01"
    assert one.service == "phalanx"
    usage = answer.body["usage"]
    assert (
        one.attributes.items()
        >= {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "phalanx",
            "gen_ai.request.model": "tiny",
            "gen_ai.response.model": "tiny",
            "gen_ai.request.max_tokens": 4,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.seed": 7,
            "gen_ai.request.id": answer.headers["x-request-id"],
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": 3,
        }.items()
    )
    assert one.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    waited = one.attributes["gen_ai.latency.time_in_queue"] + one.attributes["gen_ai.latency.time_in_model_prefill"]
    assert 0 < waited <= one.attributes["gen_ai.latency.time_to_first_token"]
    assert 0 < one.attributes["gen_ai.latency.time_to_first_token"] <= one.attributes["gen_ai.latency.e2e"]
    assert "Hello!" not in str(one.attributes)
    queue, prefill, decode = (collector.named(name)[0] for name in ("queue", "prefill", "decode"))
    assert {queue.parent, prefill.parent, decode.parent} == {one.id} and decode.trace == TRACE
    assert one.began <= queue.began <= queue.ended == prefill.began <= prefill.ended == decode.began
    assert decode.began <= decode.ended <= one.ended
    assert prefill.attributes["gen_ai.usage.cache_read.input_tokens"] == 3
    assert abs(one.ended / 1e9 - time.time()) < 60
    assert decode.attributes == {"gen_ai.usage.output_tokens": usage["completion_tokens"]}


def test_the_caller_decides_what_is_recorded(traced, collector):
    for path in ("/health", "/metrics"):  # nobody wants a trace of these
        traced.request("GET", path, None, parent())
    silent = traced.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, parent("00"))
    assert silent.headers["traceresponse"].endswith("-00")
    assert TRACE in silent.headers["traceresponse"]
    first = traced.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})
    bad = traced.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, {"Traceparent": "00-bad"})
    found = collector.named("POST /v1/completions", 2)
    assert [one.parent for one in found] == ["", ""] and len({one.trace for one in found}) == 2
    assert [one.headers["traceresponse"][3:35] for one in (first, bad)] == [one.trace for one in found]
    assert {one.trace for one in collector.spans} == {one.trace for one in found}


def test_streams_errors_and_other_endpoints(traced, collector):
    traced.events("chat/completions", **CHAT)
    traced.post("embeddings", input=["a", "b"])
    traced.request("POST", "/v1/completions", "{")
    traced.request("GET", "/v1/nothing")
    traced.scheduler.error = (500, "broken")
    traced.post("completions", prompt="x")
    traced.scheduler.error, traced.scheduler.pause = None, 0.01
    threading.Timer(0.3, traced.loop.call_soon_threadsafe, (traced.link.give_up, "the job's time is over")).start()
    stream = traced.post("completions", prompt="x", max_tokens=400, ignore_eos=True, stream=True)
    assert stream.status == 200 and b"time is over" in stream.body
    (chat,) = collector.named("POST /v1/chat")
    assert chat.attributes["gen_ai.request.stream"] is True and chat.attributes["gen_ai.usage.output_tokens"] > 0
    (vectors,) = collector.named("POST /v1/embeddings")
    assert vectors.attributes["gen_ai.operation.name"] == "embeddings" and not vectors.failed
    (other,) = collector.named("GET other")
    assert other.attributes["http.response.status_code"] == 404 and not other.failed
    bad, *broken = collector.named("POST /v1/completions", 3)
    assert (bad.attributes["http.response.status_code"], bad.failed) == (400, False)
    assert all(one.failed and one.attributes["error.type"] for one in broken)


def test_a_client_that_leaves(traced, collector):
    traced.scheduler.hold = True
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", traced.port)) as client:
        client.request("POST", "/v1/completions", json.dumps({"prompt": "x"}))
        traced.wait(lambda: traced.scheduler.requests)
    (one,) = collector.named("POST /v1/completions")
    assert one.attributes["http.response.status_code"] == 499 and not one.failed
    (queue,) = collector.named("queue")
    assert queue.parent == one.id and queue.ended > queue.began
    assert not [one for one in collector.spans if one.name == "decode"]


def test_calls_of_tool_servers(start_server, collector, tmp_path):
    config = written(tmp_path, {"mcpServers": {"local": STDIO}})
    ready = protocol.Ready(max_model_len=8192, vocab_size=400, kv_tokens=8192, block_size=16, max_num_seqs=4, ranks=1)
    server = start_server(otlp_endpoint=collector.url, mcp_config=config, scheduler={"per_delta": 8, "ready": ready})
    server.call(server.state.tools.settled(30))
    texts = ['<tool_call>\n{"name": "local_add", "arguments": {"a": 2, "b": 3}}\n</tool_call>', "It is five."]
    tokenizer = server.engine.text.tokenizer
    server.scheduler.encode = lambda _: tokenizer.encode(texts.pop(0), False)
    tools = [{"type": "mcp", "server_label": "local", "require_approval": "never"}]
    answer = server.request("POST", "/v1/responses", {"input": "hi", "tools": tools, "max_output_tokens": 64}, parent())
    assert answer.status == 200 and not texts
    (one,) = collector.named("POST /v1/responses")
    (call,) = collector.named("execute_tool add")
    assert (call.parent, call.trace, call.kind, call.failed) == (one.id, TRACE, CLIENT, False)
    assert call.attributes.items() >= {
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", "phalanx.tool_server": "local",
    }.items()  # fmt: skip
    decodes = collector.named("decode", 2)
    assert decodes[0].ended <= call.began <= call.ended <= decodes[1].began
    total = sum(one.attributes["gen_ai.usage.output_tokens"] for one in decodes)
    assert one.attributes["gen_ai.usage.output_tokens"] == total


def test_the_wait_for_another_model(traced, collector):
    async def enter(engine):
        await asyncio.sleep(0.05)  # as long as the span has to be at least
        turns.loaded = engine.model
        return engine

    turns = SimpleNamespace(named=lambda name: traced.engine, enter=enter, leave=lambda: None, loaded=1)
    traced.state.models = turns
    for _ in range(2):  # the second finds its model loaded
        assert traced.post("completions", prompt="x", max_tokens=1).status == 200
    one, _ = collector.named("POST /v1/completions", 2)
    (switch,) = collector.named("model switch")
    assert switch.parent == one.id and switch.ended - switch.began >= 40_000_000
    assert switch.attributes == {"gen_ai.request.model": "tiny"}
    assert one.began <= switch.began and switch.ended <= collector.named("queue")[0].began


def test_what_runs_in_the_background_is_recorded_once_it_is_over(traced, collector):
    answer = traced.request("POST", "/v1/responses", {"input": "hi", "background": True, "max_output_tokens": 4})
    (decode,) = collector.named("decode")
    (one,) = collector.named("POST /v1/responses")
    assert answer.status == 200 and decode.parent == one.id
    assert decode.attributes["gen_ai.usage.output_tokens"] > 0


def test_a_tool_that_fails_is_marked(collector):
    source = otel.Tracing(tracing.endpoint(collector.url), "phalanx")

    async def call():
        trace = source.begin({}, time.time())
        tracing.active.set(trace)
        with tracing.tool_call("add", "local") as said:
            said["error"] = "tool_error"
        with pytest.raises(RuntimeError), tracing.tool_call("add", "local"):
            raise RuntimeError
        trace.end("POST /x")
        await source.export.close(5)

    asyncio.run(call())
    assert [one.attributes["error.type"] for one in collector.named("execute_tool", 2)] == [
        "tool_error",
        "RuntimeError",
    ]
    assert source.export.sent == 3 and source.export.dropped == 0


def test_what_a_request_has_started_goes_on_without_its_trace(traced, collector):
    """A batch, say: its requests' sessions would be held for as long as it runs."""
    kept = []

    async def later():
        kept.append(tracing.active.get())
        while not kept[1].over:
            await asyncio.sleep(0.01)
        with tracing.tool_call("late", "local"):
            kept.append(tracing.current())

    started = traced.state.metrics.session

    def session(*args):
        kept.append(asyncio.ensure_future(later()))
        started(*args)

    traced.state.metrics.session = session
    traced.post("completions", prompt="x", max_tokens=1)
    collector.named("decode")
    traced.wait(lambda: len(kept) == 3)
    assert kept[1].sessions == [] and kept[2] is None
    assert not [one for one in collector.spans if one.name.startswith("execute_tool")]


def test_long_names_are_cut(traced, collector):
    traced.post("completions", prompt="x", model="m" * 100_000, max_tokens=1)
    (one,) = collector.named("POST /v1/completions")
    assert len(one.attributes["gen_ai.request.model"]) == otel.LONGEST_VALUE


def test_a_collector_that_fails_is_named_once_and_its_spans_are_counted(traced, collector, caplog):
    collector.status = 400
    for _ in range(3):
        assert traced.post("completions", prompt="x", max_tokens=1).status == 200
        dropped = traced.state.tracing.export.dropped
        traced.wait(lambda before=dropped: traced.state.tracing.export.dropped > before)
    text = traced.request("GET", "/metrics").body.decode()
    assert f"phalanx_spans_dropped_total {traced.state.tracing.export.dropped}.0" in text
    warned = [one for one in caplog.records if one.name.endswith("otel")]
    assert len(warned) == 1 and collector.url in warned[0].getMessage()
    collector.status = 200
    traced.post("completions", prompt="x", max_tokens=1)
    collector.named("POST /v1/completions")
    traced.wait(lambda: traced.state.tracing.export.sent)
    assert "phalanx_spans_sent_total 0.0" not in traced.request("GET", "/metrics").body.decode()


def test_too_many_spans_are_dropped(start_server, collector, monkeypatch):
    monkeypatch.setattr(otel, "MAX_WAITING", 2)
    monkeypatch.setattr(otel, "EVERY", 60.0)
    server = start_server(otlp_endpoint=collector.url)
    for _ in range(3):
        server.post("completions", prompt="x", max_tokens=1)
    export = server.state.tracing.export
    server.wait(lambda: export.dropped >= 7)
    server.call(export.close(10))
    assert export.sent == 2 and len(collector.spans) == 2


@retries.CLOCKS
def test_the_end_waits_for_no_collector(monkeypatch):
    export = otel.Export("http://127.0.0.1:9/v1/traces")  # nobody listens there: it is tried again for 10 s
    source = otel.Tracing("http://127.0.0.1:9/v1/traces", "phalanx")
    source.begin({}, time.time()).end("POST /x")
    began = time.monotonic()
    asyncio.run(source.export.close(0.2))
    asyncio.run(export.close(0.2))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("https://c/", "https://c/v1/traces"),
        ("http://c/otlp/v1/traces", "http://c/otlp/v1/traces"),
    ],
)
def test_where_spans_go(url, sent):
    assert tracing.endpoint(url) == sent


@pytest.mark.parametrize("url", ["grpc://c:4317", "c:4317", "http://", "file:///x"])
def test_what_is_no_collector(url):
    with pytest.raises(ValueError, match="--otlp-endpoint"):
        tracing.check(url)


def test_without_the_packages(monkeypatch):
    monkeypatch.setattr(tracing, "PACKAGES", ("opentelemetry.none.here",))
    with pytest.raises(ValueError, match=r"pip install 'phalanx\[otel\]'"):
        tracing.check("http://c:4318")


def test_without_the_flag_nothing_is_kept(server):
    assert server.state.tracing is None
    server.post("completions", prompt="x", max_tokens=1)
    assert tracing.active.get() is None


def test_names_of_operations_are_routes():
    from phalanx.rank.server.http.routes import routes

    assert spans.OPERATIONS.keys() <= {route.path for route in routes()}
