"""Figures that are sent to a collector."""

import asyncio
import base64
import http.server
import threading

import pytest
from phalanx.errors import FatalError
from phalanx.launcher.job.server_process import push_url
from phalanx.rank.server import metrics_push
from phalanx.rank.server.metrics_push import MetricsPush


class Collector(http.server.BaseHTTPRequestHandler):
    status = 200
    got: list = []

    def _take(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.got.append((self.command, self.path, body, self.headers.get("Authorization")))
        self.send_response(self.status)
        self.end_headers()

    do_PUT = do_DELETE = _take

    def log_message(self, *_):
        pass


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setattr(metrics_push, "EVERY", 0.05)
    Collector.got, Collector.status = [], 200
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def test_they_are_sent_again_and_again_and_taken_away_at_the_end(collector, caplog):
    url = f"http://me:pass%20word@127.0.0.1:{collector.server_port}"
    text = [b"phalanx_ready 0\n"]

    async def run():
        push = MetricsPush(push_url(url, "node7:2000"), lambda: text[0])
        sending = asyncio.ensure_future(push.run())
        await until(lambda: Collector.got)
        text[0] = b"phalanx_ready 1\n"
        await until(lambda: Collector.got[-1][2] == text[0])
        Collector.status = 500
        await until(lambda: push._failing)
        count = len(Collector.got)
        await until(lambda: len(Collector.got) > count + 2)
        Collector.status = 200
        await until(lambda: not push._failing)
        sending.cancel()
        await push.close()

    asyncio.run(run())
    key = "Basic " + base64.b64encode(b"me:pass word").decode()
    assert {(path, sent) for _, path, _, sent in Collector.got} == {("/metrics/job/phalanx/instance/node7%3A2000", key)}
    assert [method for method, *_ in Collector.got][-1] == "DELETE"
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == 2 and "pass" not in "".join(told)  # once when it fails, once when it works again


def test_nothing_is_taken_away_from_a_path_that_several_servers_may_have(collector):
    async def run():
        push = MetricsPush(push_url(f"http://127.0.0.1:{collector.server_port}/put", "x"), lambda: b"figures 1\n")
        sending = asyncio.ensure_future(push.run())
        await until(lambda: len(Collector.got) > 1)
        sending.cancel()
        await push.close()

    asyncio.run(run())
    assert {(method, path) for method, path, *_ in Collector.got} == {("PUT", "/put")}


@pytest.mark.parametrize("url", ["collector:9091", "ftp://collector", "", "http://", "file:///etc/passwd"])
def test_what_is_no_url(url):
    with pytest.raises(FatalError, match="--metrics-push"):
        push_url(url, "x")


def test_a_path_of_its_own_is_kept():
    assert push_url("https://vm:8428/api/v1/import/prometheus", "x") == "https://vm:8428/api/v1/import/prometheus"
