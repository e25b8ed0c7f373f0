"""Embeddings: the forms of input and output, and what is refused. The ranks' vectors are [tokens, 3, 0, 4]."""

import base64
import json
import math
import socket
from array import array

import pytest

from ....fields import each

pytestmark = pytest.mark.timeout(30)


def vectors(fresh_server, **body):
    answer = fresh_server.post("embeddings", **body).body
    assert each(answer["data"], "index") == list(range(len(answer["data"])))
    return [one["embedding"] for one in answer["data"]]


def test_the_openai_client(fresh_server, client):
    answer = client.embeddings.create(model="x", input=["hello", "hello world"])
    assert answer.object == "list" and answer.model == "tiny"
    length = len(fresh_server.scheduler.encode("hello"))
    norm = math.sqrt(length**2 + 25)
    assert answer.data[0].embedding == pytest.approx([length / norm, 3 / norm, 0, 4 / norm], abs=1e-6)
    assert answer.data[0].object == "embedding" and answer.data[1].index == 1
    both = length + len(fresh_server.scheduler.encode("hello world"))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == both
    sent = fresh_server.scheduler.requests[0].sampling
    assert (sent.pooling, sent.max_tokens) == ("mean", 1)


def test_the_forms_of_an_input(fresh_server):
    ids = fresh_server.scheduler.encode("hello")
    for given, lengths in (("hello", [len(ids)]), (ids, [len(ids)]), ([ids, [1, 2]], [len(ids), 2]), (["a"], [1])):
        assert [one[0] for one in vectors(fresh_server, input=given, normalize=False)] == lengths


def test_the_forms_of_a_vector(fresh_server):
    (plain,) = vectors(fresh_server, input=[1, 2], normalize=False)
    assert plain == [2, 3, 0, 4]
    (text,) = vectors(fresh_server, input=[1, 2], normalize=False, encoding_format="base64")
    assert array("f", base64.b64decode(text)).tolist() == plain
    (short,) = vectors(fresh_server, input=[1, 2, 3, 4], dimensions=2)
    assert short == pytest.approx([0.8, 0.6])


def test_how_a_model_pools(fresh_server):
    fresh_server.post("embeddings", input="a", embedding_type="last")
    assert fresh_server.scheduler.requests[-1].sampling.pooling == "last"


@pytest.mark.parametrize(
    "body, param, message",
    [
        ({}, "input", "input is missing"),
        ({"input": []}, "input", "input is an empty list: give a text, token ids, or a list of either"),
        ({"input": ["a", 1]}, "input", "input mixes token ids with texts or lists: give one kind only"),
        ({"input": [[]]}, "input", "input is empty: give at least one token"),
        ({"input": [400]}, "input", "input holds token id 400: this model's tokens are 0 to 399"),
        (
            {"input": "a", "encoding_format": "hex"},
            "encoding_format",
            'encoding_format is "hex": expected one of base64, float',
        ),
        (
            {"input": "a", "embedding_type": "max"},
            "embedding_type",
            'embedding_type is "max": expected one of cls, last',
        ),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0: it must be between 1 and"),
        ({"input": "a", "dimensions": 5}, "dimensions", "dimensions is 5: this model's vectors have 4"),
        ({"input": [1] * 600}, "input", "the input has 600 tokens, but this model takes fewer than 512; shorten it"),
        ({"input": ["a"] * 4097}, "input", "input has 4097 texts: at most 4096 are allowed in a request"),
    ],
)
def test_what_is_refused(fresh_server, body, param, message):
    answer = fresh_server.post("embeddings", **body)
    assert answer.status == 400
    assert answer.body["error"]["param"] == param
    assert answer.body["error"]["message"].startswith(message)


def test_an_error_of_the_ranks(fresh_server):
    fresh_server.scheduler.error = (400, "too long for me")
    answer = fresh_server.post("embeddings", input="a")
    assert (answer.status, answer.body["error"]["message"]) == (400, "too long for me")


def test_a_client_that_goes_away_frees_its_sequences(fresh_server):
    fresh_server.scheduler.hold = True
    body = json.dumps({"input": ["a", "b"]}).encode()
    with socket.create_connection(("127.0.0.1", fresh_server.port)) as raw:
        head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        raw.sendall(head + body)
        fresh_server.wait(lambda: len(fresh_server.scheduler.requests) == 2)
    fresh_server.wait(lambda: len(fresh_server.scheduler.aborted) == 2)


def test_models_that_are_made_for_embeddings_say_how_they_pool(tmp_path):
    from phalanx.rank.server.text.load import _pooling

    assert _pooling(tmp_path) == "mean"
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    assert _pooling(tmp_path) == "last"
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    assert _pooling(tmp_path) == "cls"
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    assert _pooling(tmp_path) == "pooling_mode_max_tokens"


def test_a_way_of_pooling_that_is_not_supported(fresh_server, monkeypatch):
    monkeypatch.setattr(fresh_server.engine.text, "pooling", "pooling_mode_max_tokens")
    answer = fresh_server.post("embeddings", input="x")
    assert answer.status == 400 and answer.body["error"]["param"] == "embedding_type"
    assert "pools by pooling_mode_max_tokens," in answer.body["error"]["message"]
    assert fresh_server.post("embeddings", input="x", embedding_type="last").status == 200


def test_nothing_is_open_afterwards(fresh_server):
    vectors(fresh_server, input="a")
    fresh_server.wait(lambda: fresh_server.link.open_sequences == 0)


def test_the_metrics_count_them(fresh_server):
    fresh_server.post("embeddings", input=[[1, 2, 3], [4]])
    fresh_server.post("embeddings", input=[])  # refused: nothing was begun
    fresh_server.scheduler.error = (507, "no room")
    fresh_server.post("embeddings", input="a")
    fresh_server.scheduler.error, fresh_server.scheduler.hold = None, True
    with socket.create_connection(("127.0.0.1", fresh_server.port)) as raw:
        raw.sendall(b'POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 14\r\n\r\n{"input": "a"}')
        fresh_server.wait(lambda: len(fresh_server.scheduler.requests) == 4)
    fresh_server.wait(lambda: fresh_server.scheduler.aborted)
    lines = fresh_server.request("GET", "/metrics").body.decode().splitlines()
    for line in (
        'phalanx_requests_total{finish_reason="stop"} 2.0',
        'phalanx_requests_total{finish_reason="error"} 1.0',
        'phalanx_requests_total{finish_reason="cancelled"} 1.0',
        "phalanx_request_prompt_tokens_count 3.0",
        "phalanx_request_prompt_tokens_sum 6.0",
        "phalanx_request_seconds_count 1.0",
    ):
        assert line in lines
