"""Large and compressed bodies beside plain chats."""

import gzip
import http.client
import json
import threading
import time
import urllib.parse
from contextlib import closing

import pytest

from .. import retries
from ..checkpoints import make_checkpoint
from ..server import Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(100), retries.CLOCKS]
SECONDS = 3
ASK = json.dumps({"prompt": [5, 6, 7], "max_tokens": 1}).encode()
MANY = 12 << 20
# Bodies with their headers: each is rejected, at once or once it is looked into.
BODIES = {
    "gzip": lambda: (gzip.compress(b'{"prompt":"' + b"a" * (63 << 20) + b'"}'), {"Content-Encoding": "gzip"}),
    "text": lambda: (b'{"prompt":"' + b'\\"[' * (MANY // 3) + b'"}', {}),
    "lists": lambda: (b'{"prompt":[' + b"[1]," * (MANY // 4) + b"[1]]}", {}),
    "not JSON": lambda: (b'"' * MANY, {}),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = str(make_checkpoint(tmp_path_factory.mktemp("bodies") / "tiny", max_position_embeddings=32768))
    with Server(model, "--np", "1", "--device", "cpu", "--mem", "64") as one:
        yield one


def post(server, body, headers):
    url = urllib.parse.urlsplit(server.url)
    with closing(http.client.HTTPConnection(url.hostname, url.port, timeout=60)) as client:
        client.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **headers})
        answer = client.getresponse()
        answer.read()
        return answer.status


def answered(server, seconds=SECONDS):
    """How many plain requests are answered in that time, one after the other."""
    until = time.monotonic() + seconds
    count = 0
    while time.monotonic() < until:
        assert post(server, ASK, {}) == 200
        count += 1
    return count


@pytest.mark.parametrize("kind", BODIES)
def test_others_go_on(server, kind):
    body = BODIES[kind]()
    alone = answered(server)
    until = time.monotonic() + SECONDS
    statuses = []

    def send():
        while time.monotonic() < until:
            statuses.append(post(server, *body))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    beside = answered(server)
    for thread in threads:
        thread.join(60)
    assert set(statuses) <= {400, 413, 429} and statuses
    assert beside > alone / 20  # the clients that send take their share of the two cores, too
