"""`phalanx bench` against a server that answers words; benchmarks/test_serve.py tests what it measures with."""

import json
import os
import re
import socket
from types import SimpleNamespace

import pytest
from phalanx.launcher import cli
from phalanx.launcher.commands.bench import run, workload
from phalanx.launcher.commands.bench.client import Failure
from phalanx.rank.server import server_registry
from phalanx.rank.server.server_registry import RegisteredServer

from ... import word_server

SMALL = ("--requests", "4", "--concurrency", "2", "--input", "101", "--output", "5")


@pytest.fixture(scope="module")
def running():
    with word_server.running() as running:
        yield running


@pytest.fixture
def server(running, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return word_server.fresh(running)


@pytest.fixture
def bench(server, capsys):
    """Run it; what it printed, by stream, and its exit code."""

    def bench(*flags, where=("--p", str(server.port))):
        code = cli.main(["bench", *where, *flags])
        printed = capsys.readouterr()
        return SimpleNamespace(code=code, out=printed.out, err=printed.err)

    return bench


def leave(name, **given):
    """The job file of a server of this process."""
    pid = os.getpid()
    job = RegisteredServer(
        host=socket.gethostname(),
        pid=pid,
        start=server_registry.start_of(pid),
        pids=server_registry.namespace(),
        **given,
    )
    server_registry.write(server_registry.directory() / f"{name}.json", job)


def test_the_table(bench, server):
    server.first = 0.2  # long enough for two requests to meet on a busy machine
    got = bench(*SMALL)
    assert (got.code, got.err) == (0, "")
    assert f"{server.url}; prompts: words" in got.out
    assert "tokens: 404 prompt (20" in got.out
    assert "speculation: 12 of 16" in got.out
    assert "60% of the output" in got.out
    assert re.search(r"^requests/s \d+\.\d\d .*tokens/s \d+\.\d ", got.out, re.M)
    assert ["mean", "p50", "p90", "p95", "p99"] in [line.split()[-5:] for line in got.out.splitlines()]
    for name in ("TTFT", "TPOT", "inter-token", "end-to-end"):
        assert re.search(rf"^{name} ms( +\d+\.\d\d){{5}}$", got.out, re.M), got.out
    assert server.max_active == 2


def test_what_is_asked(bench, server):
    assert bench(*SMALL).code == bench(*SMALL).code == 0
    prompts = {body["messages"][0]["content"] for body in server.bodies}
    assert len(prompts) == 8  # the second run must find nothing in the prefix cache
    body = server.bodies[0]
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["model"]) == (5, True, 0, "real")


def test_json(bench, server):
    server.step = 0.01
    got = bench(*SMALL, "--json", "--api-key", "secret")
    assert got.code == 0
    assert "secret" not in got.out
    assert set(server.keys) == {"Bearer secret"}
    found = json.loads(got.out)
    assert (found["model"], found["url"], found["requests"], found["failed"]) == ("real", server.url, 4, 0)
    assert (found["concurrency"], found["input_len"], found["output_len"]) == (2, 101, 5)
    assert found["output_tokens_per_s"] == pytest.approx(5 * found["requests_per_s"], rel=0.01)
    for key in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert set(found[key]) == {"mean", "p50", "p90", "p95", "p99"}
    assert found["itl_s"]["p50"] > 0.009


def test_a_request_that_failed(bench, server):
    server.plan = [400]
    got = bench(*SMALL)
    assert got.code == 1 and "4 requests in" in got.out and "1 failed" in got.out
    assert "1 × HTTP 400:" in got.out


def test_the_server_is_found_by_its_job_file(bench, server):
    leave("here-1", url=server.url, key="k", model="tiny")
    assert bench(*SMALL, where=()).code == 0
    assert set(server.keys) == {"Bearer k"}
    assert bench(*SMALL, where=("--job", "tiny")).code == 0
    leave("here-2", url="http://127.0.0.1:1", model="tiny")
    got = bench(where=())
    assert got.code == 2
    assert "`phalanx bench --job NAME`:" in got.err


def test_no_server(bench):
    got = bench(where=("--url", "http://127.0.0.1:1"))
    assert got.code == 2 and not got.out and "http://127.0.0.1:1/v1/models" in got.err and "Connection" in got.err


@pytest.mark.parametrize("models", [{"data": []}, {"object": "list"}, {"data": [{}]}])
def test_a_server_without_models(bench, server, models):
    server.models = models
    got = bench()
    why = "lists no model: is this an OpenAI-compatible server?"
    assert (got.code, got.err) == (1, f"phalanx: {server.url}/v1/models {why}\n")


def test_more_tokens_than_the_model_takes(bench, server):
    server.models = {"data": [{"id": "short", "max_model_len": 64}]}
    got = bench("--input", "60", "--output", "5")
    assert got.code == 2 and re.search("--input 60.*--output 5.*65 tokens.*64", got.err)
    assert bench("--input", "59", "--output", "5").code == 0


def test_a_server_that_cannot_be_measured(bench, server, monkeypatch):
    async def calibrate(*_):
        raise Failure("HTTP 503: a rank was lost")

    monkeypatch.setattr(workload, "calibrate", calibrate)
    assert f"phalanx: {server.url}: HTTP 503:" in bench().err
    assert bench().code == 1


def test_ctrl_c_before_there_is_anything_to_tell(bench, monkeypatch):
    async def measure(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "measure", measure)
    assert bench(*SMALL).code == 130


@pytest.mark.parametrize(("flags", "message"), [
    (["--requests", "0"], "--requests '0' (command line): must be at least 1"),
    (["--input", "long"], "--input 'long' (command line): a whole number is needed"),
    (["--concurency", "3"], "unknown option --concurency; did you mean --concurrency?"),
])  # fmt: skip
def test_wrong_flags(bench, flags, message):
    got = bench(*flags)
    assert (got.code, got.out, got.err) == (2, "", f"phalanx: {message}\n")


def test_files_of_a_batch_job_are_not_lengths(bench, monkeypatch):
    monkeypatch.setenv("PHALANX_INPUT", "requests.jsonl")
    monkeypatch.setenv("PHALANX_OUTPUT", "answers.jsonl")
    assert bench(*SMALL).code == 0


def test_show_config(bench):
    got = bench("--show-config", "--api-key", "secret", "--output", "7")
    assert got.code == 0 and "secret" not in got.out
    assert re.search(r"^output_len +7 .*\(--output\)$", got.out, re.M)
    assert re.search(r"^requests +64 +default$", got.out, re.M)
