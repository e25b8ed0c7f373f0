"""A live job that sleeps: its ranks stay, its memory is given back, and it answers as before once it is woken."""

import threading
from pathlib import Path

import pytest

from . import retries
from .checkpoints import make_checkpoint
from .server import Server, Stream

pytestmark = [pytest.mark.long, pytest.mark.timeout(180), retries.CLOCKS]
BODY = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
WEIGHTS = 60_000  # KB that the weights of both ranks take at least


def resident(pids) -> int:
    """KB of memory that these processes have."""
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    return sum(int(text.partition("VmRSS:")[2].split()[0]) for text in texts)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    # Large enough that its weights show in what the ranks have.
    sizes = {"max_position_embeddings": 32768, "vocab_size": 40000, "hidden_size": 768}
    return make_checkpoint(tmp_path_factory.mktemp("m") / "m", **sizes)


@pytest.fixture(scope="module")
def server(checkpoint):
    with Server(str(checkpoint), "--np", "2", "--device", "cpu", "--mem", "64", "--admin") as server:
        yield server


def answer(server: Server) -> str:
    return server.request("/v1/completions", BODY)[1]["choices"][0]["text"]


def asleep(server: Server) -> bool:
    return server.request("/is_sleeping")[1]["is_sleeping"]


def post(server: Server, path: str) -> int:
    """The status of a request without a body."""
    return server.request(path, b"")[0]


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_waking(server, level):
    ranks, first = server.ranks, answer(server)
    awake = resident(ranks)
    stream = Stream(server, 100)
    slept: list[int] = []
    sleeping = threading.Thread(target=lambda: slept.append(post(server, f"/sleep?level={level}")))
    sleeping.start()
    assert stream.rest().endswith("data: [DONE]\n\n")  # what is open is finished first
    sleeping.join(60)
    assert slept == [200] and asleep(server)
    status, body, headers = server.request("/v1/completions", BODY)
    assert (status, body["error"]["code"], headers["X-Not-Taken"]) == (503, "sleeping", "sleeping")
    status, body, _ = server.request("/health")
    assert (status, body["status"]) == (503, "sleeping")
    assert server.ranks == ranks
    assert (awake - resident(ranks) > WEIGHTS) == (level == 2)
    assert post(server, "/wake_up") == 200 and not asleep(server)
    assert server.request("/health")[0] == 200 and server.ranks == ranks
    assert answer(server) == first


@pytest.mark.parametrize(
    ("level", "steps"),
    [
        (1, ["/wake_up?tags=weights", "/wake_up?tags=kv_cache"]),
        (2, ["/wake_up?tags=kv_cache", "/wake_up?tags=weights"]),
        (2, ["/wake_up?tags=weights", "/sleep?level=1", "/wake_up?tags=kv_cache&tags=weights"]),
    ],
)
def test_weights_and_cache_wake_one_after_the_other(server, level, steps):
    first = answer(server)
    assert post(server, f"/sleep?level={level}") == 200
    before = resident(server.ranks)
    for step in steps:
        assert asleep(server)
        assert server.request("/v1/completions", BODY)[1]["error"]["code"] == "sleeping"
        assert post(server, step) == 200
        if (level, step) == (2, "/wake_up?tags=weights") and step == steps[0]:
            assert resident(server.ranks) > before + WEIGHTS
    assert not asleep(server) and answer(server) == first


def test_what_cannot_be_woken(server):
    assert post(server, "/wake_up?tags=disk") == 400
    assert post(server, "/sleep?level=0") == 400


def test_a_model_that_cannot_be_woken_sleeps_on(server, checkpoint):
    first, config = answer(server), checkpoint / "config.json"
    for level, status in ((1, 200), (2, 503)):
        assert post(server, f"/sleep?level={level}") == 200
        config.rename(checkpoint / "away")
        try:
            assert post(server, "/wake_up") == status  # at level 1 the files are not needed
        finally:
            (checkpoint / "away").rename(config)
        assert asleep(server) == (status == 503)
    assert post(server, "/wake_up") == 200 and answer(server) == first


def test_the_end_of_a_job_that_sleeps(server):
    assert post(server, "/sleep") == 200
    server.process.terminate()
    assert server.exit_code(30) == 0, server.output
