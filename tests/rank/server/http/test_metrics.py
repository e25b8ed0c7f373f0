import json
import socket

import pytest
from phalanx.rank.protocol import Stats
from phalanx.rank.server.engine_client import EngineClient
from phalanx.rank.server.http.metrics import Metrics


def test_strange_methods_and_paths_make_no_series_of_their_own(tmp_path):
    metrics = Metrics(EngineClient(str(tmp_path / "s")), "m")
    for i in range(50):
        metrics.http(f"FOO{i}", "other", 405)
    series = [line for line in metrics.text().decode().splitlines() if line.startswith("phalanx_http_requests_total{")]
    assert series == ['phalanx_http_requests_total{method="other",path="other",status="405"} 50.0']


def test_the_hit_ratio_of_resident_experts(tmp_path):
    link = EngineClient(str(tmp_path / "s"))
    name = b"phalanx_experts_hit_ratio "
    assert name + b"0.0\n" in Metrics(link, "m").text()
    link.stats = Stats(experts_resident=6, experts_cpu=1, experts_streamed=1, experts_loaded=5)
    assert name + b"0.75\n" in Metrics(link, "m").text()


@pytest.mark.parametrize("state", ["loading", "ready", "unloaded", "draining", "restarting", "failed"])
def test_ready_is_said_where_requests_are_answered(tmp_path, state):
    link = EngineClient(str(tmp_path / "s"))
    link.state = state
    assert b"phalanx_ready %.1f\n" % (state in ("ready", "unloaded")) in Metrics(link, "m").text()


def test_the_end_of_the_certificate_is_there_where_there_is_one(tmp_path):
    link = EngineClient(str(tmp_path / "s"))
    name = b"\nphalanx_tls_certificate_end_seconds "
    assert name not in Metrics(link, "m").text()
    assert name + b"5e+09\n" in Metrics(link, "m", 5e9).text()


@pytest.mark.parametrize("path", ["completions", "embeddings"])
def test_a_client_that_leaves_before_its_answer_is_not_a_success(start_server, path):
    server = start_server(scheduler={"hold": True})
    body = json.dumps({"prompt": "x"} if path == "completions" else {"input": "x"})
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall((head + body).encode())
        server.wait(lambda: server.scheduler.requests)
    server.wait(lambda: not server.state.active)
    series = f'phalanx_http_requests_total{{method="POST",path="/v1/{path}",status="499"}} 1.0'
    server.wait(lambda: series in server.state.metrics.text().decode())


def test_speculation(tmp_path):
    link = EngineClient(str(tmp_path / "s"))
    link.stats = Stats(speculation={"ngram": [4, 12, 3, 2], "mtp": [1, 3]}, speculation_seconds=2.0, plain_seconds=3.0)
    lines = Metrics(link, "m").text().decode().splitlines()
    for prefix, rest in (("phalanx_", ""), ("vllm:", 'engine="0",model_name="m",')):
        for name, labels, value in (
            ("num_drafts_total", 'source="ngram"', 4),
            ("num_draft_tokens_total", 'source="mtp"', 3),
            ("num_accepted_tokens_total", 'source="ngram"', 5),
            ("num_accepted_tokens_per_pos_total", 'position="1",source="ngram"', 2),
        ):
            found = [line for line in lines if line.startswith(f"{prefix}spec_decode_{name}{{")]
            assert any(
                set(line.partition("{")[2].partition("}")[0].split(",")) == set((rest + labels).split(","))
                and float(line.rpartition(" ")[2]) == value
                for line in found
            ), found
    assert "phalanx_spec_decode_plain_seconds_total 3.0" in lines
