"""A live job whose requests are traced: rank 0's part of the times, the log, a collector that goes away, the end."""

import json
import time

import pytest

from . import retries
from .collector import Collector
from .processes import wait
from .server import Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(180), retries.CLOCKS]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20, "ignore_eos": True}


def ask(server: Server) -> dict[str, str]:
    """A chat that belongs to TRACE; the answer's headers."""
    parent = f"00-{TRACE}-00f067aa0ba902b7-01"
    status, _, headers = server.request("/v1/chat/completions", CHAT, Traceparent=parent)
    assert status == 200
    return headers


def test_a_live_job():
    collector = Collector()
    flags = "--np", "2", "--device", "cpu", "--mem", "64", "--access-log", "--log-format", "json"
    with collector, Server(*flags, "--otlp-traces-endpoint", collector.url, OTEL_SERVICE_NAME="mine") as server:
        headers = ask(server)
        (one,) = collector.named("POST /v1/chat/completions")
        queue, prefill, decode = (collector.named(name)[0] for name in ("queue", "prefill", "decode"))
        assert {span.parent for span in (queue, prefill, decode)} == {one.id} and one.service == "mine"
        assert one.began <= queue.began < queue.ended == prefill.began < prefill.ended == decode.began < decode.ended
        assert decode.ended <= one.ended and abs(one.ended / 1e9 - time.time()) < 60
        assert decode.attributes["gen_ai.usage.output_tokens"] == 20
        assert headers["Traceresponse"] == f"00-{TRACE}-{one.id}-01"
        assert not wait(lambda: one.id not in server.output, 10)
        (line,) = [json.loads(line) for line in server.lines if one.id in line]
        assert (line["trace_id"], line["span_id"], line["status"]) == (TRACE, one.id, 200)

        collector.status = 503  # which is tried again for ten seconds
        posts = len(collector.posts)
        ask(server)
        assert not wait(lambda: len(collector.posts) == posts, 20)
        for _ in range(20):
            ask(server)
        assert not wait(lambda: not server.metric("phalanx_spans_dropped_total"), 30)
        collector.status = 200
        collector.spans.clear()
        ask(server)
        server.process.terminate()  # what waits is sent at the end
        assert server.exit_code(30) == 0
        assert collector.named("POST /v1/chat/completions")


@pytest.mark.parametrize("url", ["grpc://127.0.0.1:4317", "collector"])
def test_what_is_no_collector(url):
    with Server("--device", "cpu", "--otlp-endpoint", url, wait=False) as server:
        assert server.exit_code(30) == 2
        assert "--otlp-endpoint" in server.output
