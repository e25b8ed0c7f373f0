"""W3C traceparent: read by the standard's rules, answered and logged."""

import json
import logging

import pytest
from phalanx import logs
from phalanx.rank.server import trace_context

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    "header", [f"00-{TRACE}-{PARENT}-01", f" 00-{TRACE}-{PARENT}-00\t", f"cc-{TRACE}-{PARENT}-01",
               f"cc-{TRACE}-{PARENT}-01-what-comes-later"],
)  # fmt: skip
def test_valid_headers(header):
    trace = trace_context.read(header)
    assert trace.trace_id == TRACE
    assert trace.span_id not in (PARENT, "0" * 16)
    assert trace_context.read(trace.header()).trace_id == TRACE


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-01\n",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-01,00-{TRACE}-{PARENT}-01",
        f"cc-{TRACE}-{PARENT}-01x",
        f"ff-{TRACE}-{PARENT}-01",
        f"0٣-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE[1:]}-{PARENT}-01",
    ],
)
def test_invalid_headers_are_ignored(header):
    assert trace_context.read(header) is None


@pytest.fixture
def lines(monkeypatch):
    """The log's lines as `--log-format json` writes them."""
    monkeypatch.setattr(logs, "_process", "server")
    found: list[str] = []
    handler = logging.Handler()
    handler.setFormatter(logs.formatter(""))
    handler.emit = lambda record: found.append(handler.format(record))
    log = logging.getLogger("phalanx")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(handler)
    log.setLevel(level)


def test_the_trace_is_in_the_answer_and_in_the_access_log(start_server, lines):
    server = start_server(access_log=True)
    parent = {"Traceparent": f"00-{TRACE}-{PARENT}-01"}
    answers = [
        server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2}, parent),
        server.request("POST", "/v1/completions", "{", parent),
        server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2, "stream": True}, parent),
        server.request("GET", "/nowhere", None, parent),
    ]
    assert [one.status for one in answers] == [200, 400, 200, 404]
    without = [server.request("GET", "/health"), server.request("GET", "/health", None, {"Traceparent": "00-bad"})]
    assert not any("traceresponse" in one.headers for one in without)
    server.wait(lambda: len(lines) == len(answers) + len(without))
    logged = [json.loads(line) for line in lines]
    for answer, line in zip(answers, logged, strict=False):
        version, trace, span, flags = answer.headers["traceresponse"].split("-")
        assert (version, trace, flags) == ("00", TRACE, "00")
        assert (line["trace_id"], line["span_id"], line["status"]) == (trace, span, answer.status)
        assert line["request_id"] == answer.headers["x-request-id"]
        assert line["message"].endswith(f" {line['request_id']} {trace} {span}")
    spans = {line["span_id"] for line in logged[: len(answers)]}
    assert len(spans) == len(answers)
    assert not any("trace_id" in line for line in logged[len(answers) :])


def test_what_is_logged_while_a_request_is_handled_has_its_ids(start_server, lines, monkeypatch):
    server = start_server()
    monkeypatch.setattr(server.state.metrics, "text", lambda: 1 / 0)
    asked = {"Traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    assert server.request("GET", "/metrics", None, asked).status == 500
    server.wait(lambda: lines)
    (line,) = map(json.loads, lines)
    assert (line["request_id"], line["trace_id"], line["level"]) == ("mine", TRACE, "error")
    assert "ZeroDivisionError" in line["exception"]
