"""benchmarks/serve.py against a small server of its own kind: what it sends, what it measures, what it says."""

import asyncio
import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from phalanx.benchmarks import serve
from phalanx.launcher.commands.bench import client, report, run, workload
from PIL import Image

from .. import retries
from ..fields import each
from ..word_server import IDS, count
from .conftest import SMALL

pytestmark = retries.CLOCKS

ROOT = Path(__file__).parents[2]


def row(out, name):
    """The numbers of a row of the table."""
    found = re.search(rf"^{re.escape(name)}  +(.*)$", out, re.M)
    assert found, out
    return [float(word) for word in found[1].split()]


def test_table(bench, server):
    server.first, server.step = 0.08, 0.02
    got = bench(*SMALL)
    assert got.code == 0 and got.err == ""
    assert f"{server.url}/v1/chat/completions; prompts: words" in got.out
    assert re.search("^4 requests.* 0 failed", got.out, re.M)
    assert "cached), 20 output, 1.00" in got.out
    assert ["mean", "p50", "p90", "p95", "p99"] in [line.split()[-5:] for line in got.out.splitlines()]
    ttft, tpot, gap, whole = (row(got.out, f"{name} ms") for name in ("TTFT", "TPOT", "inter-token", "end-to-end"))
    for values, low in ((ttft, 75), (tpot, 18), (gap, 18), (whole, 155)):
        assert len(values) == 5 and all(low < value < 10 * low for value in values)
    rates = [float(x) for x in re.findall(r"/s (\d+\.\d+)", got.out)]
    assert rates[1] == pytest.approx(5 * rates[0], rel=0.01)
    assert rates[2] == pytest.approx(106 * rates[0], rel=0.01)
    assert re.search(r"^client: \d+%", got.out, re.M)


def test_what_is_sent_by_default(bench, server):
    assert bench(*SMALL).code == 0
    assert len(server.bodies) == 4 and len({b["messages"][0]["content"] for b in server.bodies}) == 4
    body = server.bodies[0]
    assert each(body.pop("messages"), "role") == ["user"]
    assert body == {
        "model": "real",
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 5,
    }
    assert server.keys == ["Bearer EMPTY"]


def test_json_lines(bench, server, tmp_path):
    path = tmp_path / "run.json"
    server.plan = [400]
    got = bench(*SMALL, "--json", path, "--api-key", "secret", "--concurrency", 1)
    assert got.code == 1 and server.keys == ["Bearer secret"]
    text = path.read_text()
    assert "secret" not in text
    *lines, last = map(json.loads, text.splitlines())
    assert each(lines, "kind") == ["request"] * 4
    assert each(lines, "index") == [0, 1, 2, 3]
    assert "HTTP 400:" in lines[0]["error"] and "ttft_s" not in lines[0]
    good = lines[1]
    assert (good["prompt_tokens"], good["output_tokens"], good["cached_tokens"]) == (101, 5, 5)
    assert good["finish"] == "length"
    assert good["error"] is None
    assert len(good["gaps_s"]) == 4
    assert good["tpot_s"] == pytest.approx((good["e2e_s"] - good["ttft_s"]) / 4, abs=1e-5)
    assert last["kind"] == "summary" and last["host"] == socket.gethostname()
    assert last["models"] == server.models
    assert last["date"][:2] == "20"
    assert last["flags"]["input_lens"] == [101]
    assert last["flags"]["seed"] == 0
    assert (last["requests"], last["failed"], last["output_tokens"]) == (4, 1, 15)
    assert [(why[:8], count) for why, count in last["failures"].items()] == [("HTTP 400", 1)]
    assert set(last["ttft_s"]) == {"mean", "p50", "p90", "p95", "p99"}
    assert last["output_tokens_per_s"] == pytest.approx(15 / last["wall_s"], rel=0.01)


def test_a_retried_request_is_timed_from_its_first_attempt(bench, server, monkeypatch):
    monkeypatch.setattr(run, "FIRST_WAIT", 0.2)
    server.plan = ["cut"]
    got = bench("--batch", 1, "--input-len", 50, "--output-len", 3)
    assert row(got.out, "TTFT ms")[0] > 200


def test_an_answer_without_text_ends_its_own_first_token(bench, server):
    server.plan = ["silent"]
    server.step = 0.02
    got = bench("--batch", 1, "--input-len", 50, "--output-len", 3)
    assert got.code == 0
    assert row(got.out, "TTFT ms")[0] > 35
    assert re.search(r"^inter-token ms +- +-", got.out, re.M)


def test_warm_up(bench, server):
    assert bench(*SMALL, "--warmup", 3).code == 0
    assert len(server.bodies) == 7 and len({json.dumps(b) for b in server.bodies}) == 7
    server.plan = [400]
    got = bench(*SMALL, "--warmup", 1)
    assert got.code == 1 and "warm-up failed: HTTP 400:" in got.err


def test_concurrency(bench, server):
    server.step = 0.01
    assert bench("--batch", 9, "--input-len", 50, "--output-len", 4, "--concurrency", 3).code == 0
    assert server.max_active == 3


def test_lists_of_lengths(bench, server):
    got = bench("--batch", 12, "--input-lens", "50,101,200", "--output_lens=2,4", "--print-request-metrics")
    assert got.code == 0
    rows = re.findall(r"^ +\d+ +\d+\.\d\d +(\d+) +(\d+) ", got.out, re.M)
    assert {int(prompt) for prompt, _ in rows} == {50, 101, 200} and {output for _, output in rows} == {"2", "4"}
    assert sorted(int(prompt) for prompt, _ in rows) == sorted(count(b) for b in server.bodies)


def test_history_and_sampling(bench, server):
    got = bench(
        "--num_prompts",
        1,
        "--input_len",
        101,
        "--max_tokens",
        2,
        "--history-turns",
        2,
        "--history-tokens",
        30,
        "--history-reasoning-tokens",
        60,
        "--thinking",
        "--ignore-eos",
        "--temperature",
        0.5,
        "--top-p",
        0.9,
        "--top-k",
        40,
        "--min-p",
        0.1,
        "--frequency-penalty",
        -1,
        "--presence-penalty",
        1,
        "--repetition-penalty",
        1.1,
        "--repeat-last-n",
        64,
        "--model",
        "mine",
    )
    assert got.code == 0
    body = server.bodies[0]
    messages = body.pop("messages")
    assert each(messages, "role") == ["user", "assistant", "user", "assistant", "user"]
    assert [len(m["content"].split()) for m in messages] == [10, 10, 10, 10, 30]
    assert len(messages[1]["reasoning_content"].split()) == 20
    assert body == {
        "model": "mine",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "frequency_penalty": -1,
        "presence_penalty": 1,
        "repetition_penalty": 1.1,
        "repeat_last_n": 64,
        "thinking": True,
        "chat_template_kwargs": {"enable_thinking": True},
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 2,
    }


def test_images(bench, server):
    assert bench(*SMALL, "--image", 40, "--history-turns", 1, "--warmup", 1).code == 0
    urls = []
    for body in server.bodies:
        *_, said = body["messages"]
        (shown, text), before = said["content"], body["messages"][:-1]
        assert len(text["text"].split()) == 30
        assert {type(one["content"]) for one in before} == {str}
        urls.append(shown["image_url"]["url"])
    assert len(set(urls)) == 5
    header, _, data = urls[0].partition(",")
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert (header, image.format, image.size) == ("data:image/jpeg;base64", "JPEG", (40, 40))


def test_a_stream_beside_the_load(bench, server, tmp_path):
    """It begins after the warm-up and before all others, and is of text."""
    path = tmp_path / "run.json"
    server.step = 0.002
    flags = "--image", 16, "--warmup", 1, "--ignore-eos", "--json", path
    got = bench("--batch", 3, "--input-len", 50, "--output-len", 40, "--beside", 4000, *flags)
    assert got.code == 0 and each(server.bodies, "max_tokens") == [40, 4000, 40, 40, 40]
    assert isinstance(server.bodies[1]["messages"][0]["content"], str)
    last = json.loads(path.read_text().splitlines()[-1])
    assert last["requests"] == 3
    assert not last["beside_ended"] and "warning:" not in got.out
    assert 0.002 < last["beside_s"]["p50"] <= last["beside_longest_s"]
    for name, key in (("stream alone ms", "alone_s"), ("beside the load ms", "beside_s")):
        assert row(got.out, name)[1] == pytest.approx(1000 * last[key]["p50"], abs=0.01)


def test_a_stream_that_ends_before_the_load(bench, server):
    server.step = 0.002
    got = bench("--batch", 1, "--input-len", 50, "--output-len", 400, "--beside", 120)
    assert got.code == 0 and "warning:" in got.out
    got = bench("--batch", 1, "--input-len", 50, "--output-len", 4, "--beside", 20)
    assert got.code == 1 and "20 events" in got.err


def test_token_ids(bench, server):
    got = bench("--batch", 3, "--input-lens", "17,33", "--output-len", 2, "--token-ids", "--print-request-metrics")
    assert got.code == 0 and "exact lengths," in got.out
    assert {len(b["prompt"]) for b in server.bodies} == {17, 33}
    assert {token for b in server.bodies for token in b["prompt"]} == set(IDS[1:])  # the first may be a BOS
    server.tells_ids = False
    got = bench(*SMALL, "--token-ids")
    assert got.code == 0 and "the server told none" in got.out


def test_completions(bench, server):
    got = bench(*SMALL, "--endpoint", "completions", "--base-url", server.url + "/v1/")
    assert got.code == 0 and {count(b) for b in server.bodies} == {101}
    assert isinstance(server.bodies[0]["prompt"], str)


def test_samples(bench, server):
    got = bench("--batch", 1, "--input-len", 50, "--output-len", 9, "--print-samples", "--sample-chars", 8)
    assert got.out.partition("request 0: ")[2].startswith("\n w0 w1 w\n")


def test_arrivals_are_a_seeded_poisson_process():
    def jobs(*flags):
        return workload.jobs(serve.load_of(serve.read([*flags])), "m", workload.Scale(), 400)

    one, same, other = jobs("--request-rate", "20"), jobs("--request-rate", "20"), jobs("--request-rate=20", "--seed=1")
    assert one == same and all(a.body != b.body for a, b in zip(one, other, strict=True))
    gaps = [b.due - a.due for a, b in zip(one, one[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    assert one[0].due == 0 and mean == pytest.approx(1 / 20, rel=0.15)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.2)  # as of an exponential distribution
    assert all(job.due == 0 for job in jobs())


def test_request_rate(bench, server, tmp_path):
    path = tmp_path / "run.json"
    assert bench("--batch", 6, "--input-len", 50, "--output-len", 2, "--request-rate", 20, "--json", path).code == 0
    *lines, last = map(json.loads, path.read_text().splitlines())
    assert last["flags"]["concurrency"] == 0
    assert each(lines, "sent_s") == pytest.approx(each(lines, "due_s"), abs=0.15)
    server.step = 0.1
    got = bench("--batch", 4, "--input-len", 50, "--output-len", 2, "--request-rate", 500, "--concurrency", 1)
    assert re.search(r"^warning: .* \d+\.\d\d s", got.out, re.M)


def test_percentiles():
    assert report.spread([]) == {}
    assert report.spread([3.0]) == dict.fromkeys(("mean", "p50", "p90", "p95", "p99"), 3.0)
    found = report.spread([float(x) for x in range(100, -1, -1)])
    assert found == pytest.approx({"mean": 50, "p50": 50, "p90": 90, "p95": 95, "p99": 99})
    assert report.spread([1.0, 2.0])["p90"] == pytest.approx(1.9)


def test_models(bench, server):
    server.models = None  # a server without the page
    assert bench(*SMALL).code == 0 and server.bodies[0]["model"] == "any"
    server.models = {"data": [{"id": "short", "max_model_len": 64}]}
    got = bench(*SMALL)
    assert "tokens, --input-len and --output-len" in got.err


@pytest.mark.parametrize(("flags", "url"), [
    ([], "http://127.0.0.1:2000"),
    (["--port", "8000"], "http://127.0.0.1:8000"),
    (["--base-url", "http://host:8000/v1"], "http://host:8000"),
    (["--base-url", "http://[::1]", "--port", "7"], "http://[::1]:7"),
    (["--base-url", "https://host/api/v1/"], "https://host/api"),
])  # fmt: skip
def test_address(flags, url):
    assert serve.read(flags).base_url == url


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
def test_streams_in_pieces_of_any_size(size):
    events = [
        b'data: {"choices":[{"delta":{"content":"\xc3\xa9"}}]}\n\n',
        b": nothing\n\n",
        b'data:{"choices":[{"delta":{"reasoning_content":"b"}}]}\r\n\r\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{}]}, "finish_reason":"stop"}]}\n\ndata: [DONE]\n\n',
    ]
    body = b"".join(events)
    chunks = [body[i : i + 41] for i in range(0, len(body), 41)]
    wire = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"%x;x=y\r\n%s\r\n" % (len(c), c) for c in chunks)
        + b"0\r\n\r\n"
    )

    async def read():
        answer = client.Answer(keep_text=True)
        exchange = client.Exchange(b"", answer.event)
        for at in range(0, len(wire), size):
            piece = wire[at : at + size]
            exchange.get_buffer(-1)[: len(piece)] = piece
            exchange.buffer_updated(len(piece))
        await asyncio.wait_for(exchange.done, 1)
        return answer

    answer = asyncio.run(read())
    assert answer.text == ["é", "b"]
    assert len(answer.times) == 3
    assert answer.finish == "stop"
    assert answer.error is None


def test_as_a_script_and_ctrl_c(tmp_path):
    """It runs from any directory, many streams at once; an interrupted run still reports."""
    script = [sys.executable, ROOT / "benchmarks/serving/dummy.py", "--p", "0", "--rate", "50"]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as dummy:
        try:
            url = dummy.stdout.readline().strip()
            flags = ["--base-url", url, "--input-len", "32", "--batch", "64", "--concurrency", "64"]
            command = [sys.executable, ROOT / "benchmarks/serve.py", *flags]
            done = subprocess.run(
                [*command, "--output-len", "20"], cwd=tmp_path, capture_output=True, text=True, timeout=20
            )
            assert done.returncode == 0, done.stderr
            assert "64 requests" in done.stdout and "1280 output, 1.00" in done.stdout
            with subprocess.Popen(
                [*command, "--output-len", "9999"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
            ) as long:
                assert long.stdout.readline().startswith("dummy at")
                time.sleep(0.3)  # some requests are under way by then; what has not begun ends alike
                os.kill(long.pid, signal.SIGINT)
                out = long.communicate(timeout=10)[0]
            assert long.returncode == 1 and "64 failed" in out and "64 × interrupted" in out
        finally:
            dummy.kill()
