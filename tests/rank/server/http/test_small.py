"""The small endpoints and what all requests share: probes, versions, descriptions, codings, paths of other servers."""

import gzip
import json
import random
import re

import pytest
from phalanx.rank.server.http import handler, openapi
from phalanx.rank.server.http.routes import routes

from ....fields import each, joined

pytestmark = pytest.mark.timeout(30)
HELLO = {"messages": "hi", "max_tokens": 3}


def test_probes(server, start_server):
    assert server.request("GET", "/ready").body["status"] == "ready"
    assert server.request("GET", "/ping").status == 200
    assert server.request("GET", "/ping").body == b""
    assert server.request("HEAD", "/health").status == 200
    assert server.request("GET", "/load").body == {"server_load": 0}
    assert re.fullmatch(r"[\d.]+|unknown", server.request("GET", "/version").body["version"])
    loading = start_server(connect=False)
    assert loading.request("GET", "/ping").status == 503
    assert loading.request("GET", "/ready").headers["Retry-After"]


def test_paths_without_v1(server):
    assert server.request("POST", "/chat/completions", HELLO).body["object"] == "chat.completion"
    assert server.request("POST", "/completions", {"prompt": "x"}).body["object"] == "text_completion"
    assert server.request("POST", "/embeddings", {"input": "x"}).body["object"] == "list"
    assert server.request("GET", "/models").body == server.request("GET", "/v1/models").body


def test_every_route_is_described(server):
    described = server.request("GET", "/openapi.json").body
    found = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert found == {(route.method, path) for route in routes() for path in (route.path, *route.also)}
    ids = [one["operationId"] for methods in described["paths"].values() for one in methods.values()]
    assert len(ids) == len(set(ids))
    refs = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(described)))
    schemas = {one for one in refs if not one.startswith("#/components/responses/")}
    assert schemas == {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    chat = described["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["messages"] and chat["properties"]["temperature"]["description"]


def test_what_the_description_says_of_answers_and_keys(server):
    described = server.request("GET", "/openapi.json").body
    media = lambda path, method="get": set(described["paths"][path][method]["responses"]["200"].get("content", ()))  # noqa: E731
    assert media("/v1/responses", "post") == media("/v1/messages", "post") == {"application/json", "text/event-stream"}
    assert media("/v1/responses/{response_id}") == {"application/json", "text/event-stream"}
    assert media("/v1/responses/{response_id}", "delete") == {"application/json"} and media("/ping") == set()
    for path in ("/metrics", "/docs", "/openapi.json"):
        (kind,) = media(path)
        assert server.request("GET", path).headers["Content-Type"].startswith(kind)
    schemes = described["components"]["securitySchemes"]
    assert schemes["header"] == {"type": "apiKey", "in": "header", "name": "X-Api-Key"}
    for one in described["paths"]["/v1/models"]["get"]["security"]:
        assert set(one) <= set(schemes)


def test_the_page_needs_nothing_from_elsewhere(server):
    answer = server.request("GET", "/docs")
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    page = answer.body.decode()
    assert "http:" not in page and "https:" not in page and "<script" not in page
    assert all(route.path in page for route in routes()) and page.encode() == openapi.documents()


def test_compressed_bodies(server, monkeypatch):
    def post(body, coding="gzip"):
        return server.request("POST", "/v1/chat/completions", body, {"Content-Encoding": coding})

    body = gzip.compress(json.dumps(HELLO).encode())
    assert post(body).status == 200 and post(body, "identity").status == 400
    for wrong, words in ((body[:-9], "it is cut off"), (b"no gzip", "is not valid gzip")):
        answer = post(wrong)
        assert answer.status == 400 and words in answer.body["error"]["message"]
    answer = post(body, "br")
    assert answer.status == 415 and "br: send gzip" in answer.body["error"]["message"]
    large = gzip.compress(json.dumps({"prompt": ["word"], "metadata": {"x": random.randbytes(1 << 20).hex()}}).encode())
    answer = server.request("POST", "/v1/completions", large, {"Content-Encoding": "gzip"})
    assert answer.status == 200 and not server.state.coming.held(0)
    bomb = gzip.compress(b" " * (2 << 20))
    assert len(bomb) < 3000 and post(bomb).status == 413
    monkeypatch.setattr(handler, "MAX_BODY", 1 << 20)
    assert post(large).status == 413


def test_the_fingerprint_is_the_server_s(server):
    whole = server.post("chat/completions", **HELLO).body["system_fingerprint"]
    assert whole.startswith("fp_") and server.post("completions", prompt="x").body["system_fingerprint"] == whole
    events = server.events("chat/completions", **HELLO)
    assert set(each(events[:-1], "system_fingerprint")) == {whole}


@pytest.mark.parametrize("shown", [True, False])
def test_reasoning_under_both_names_or_not_at_all(server, monkeypatch, shown):
    monkeypatch.setattr(server.scheduler, "answer", "<think>\nhm\n</think>\n\nyes")
    body = {"messages": "hi", "include_reasoning": shown}
    message = server.post("chat/completions", **body).body["choices"][0]["message"]
    assert message["content"] == "yes" and ("reasoning" in message) == shown
    assert message.get("reasoning") == message.get("reasoning_content") == ("hm" if shown else None)
    deltas = [event["choices"][0]["delta"] for event in server.events("chat/completions", **body)[:-1]]
    thoughts = [joined(delta.get(name) for delta in deltas) for name in ("reasoning", "reasoning_content")]
    assert thoughts == (["hm", "hm"] if shown else ["", ""])
    assert joined(delta.get("content") for delta in deltas) == "yes"


def test_fields_that_change_nothing(server):
    body = {"metadata": {"a": "b"}, "store": True, "user": "me", "service_tier": "auto", "stop": {"Single": "zz"}}
    assert server.post("chat/completions", **HELLO, **body).status == 200
    assert server.post("chat/completions", **HELLO, priority=0).status == 200
    assert server.scheduler.requests[-1].priority == 0


def test_metrics_under_vllm_s_names(server):
    server.post("chat/completions", **HELLO)
    page = server.request("GET", "/metrics").body.decode()
    label = r'\{engine="0",(?:\w+="\w+",)?model_name="tiny"\}'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
                 "generation_tokens_total", "time_to_first_token_seconds_count", "num_preemptions_total",
                 "e2e_request_latency_seconds_sum"):  # fmt: skip
        assert re.search(rf"^vllm:{name}{label} [\d.e-]+$", page, re.MULTILINE), name
    assert re.search(r'^vllm:request_success_total\{.*finished_reason="(stop|length)".*\} \d', page, re.MULTILINE)
