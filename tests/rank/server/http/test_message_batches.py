"""Anthropic's message batches, by Anthropic's own client."""

import time

import pytest

from ....late import Late
from .batching import client_of, leave

anthropic = Late("anthropic")

pytestmark = pytest.mark.timeout(300)


def client_at(server, key="x"):
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key=key, max_retries=0)


def asked(name, **params):
    turn = {"role": "user", "content": f"hello {name}"}
    return {"custom_id": name, "params": {"model": "m", "max_tokens": 8, "messages": [turn], **params}}


def ended(client, id):
    deadline = time.monotonic() + 120
    while (batch := client.messages.batches.retrieve(id)).processing_status != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def test_a_batch(store_server):
    server = store_server()
    with client_at(server) as client:
        batches = client.messages.batches
        made = batches.create(requests=[asked("a"), asked("b", max_tokens=1), asked("c", messages=[])])
        assert made.id.startswith("msgbatch_") and made.type == "message_batch" and made.results_url is None
        assert (made.processing_status, made.request_counts.processing) == ("in_progress", 3)
        done = ended(client, made.id)
        counts = done.request_counts
        assert (counts.succeeded, counts.errored, counts.processing) == (2, 1, 0) and done.ended_at >= done.created_at
        found = {one.custom_id: one.result for one in batches.results(made.id)}
        assert found["a"].message.content[0].text.startswith("hello world")
        assert (found["b"].message.stop_reason, found["b"].message.usage.output_tokens) == ("max_tokens", 1)
        assert (found["c"].type, found["c"].error.error.type) == ("errored", "invalid_request_error")
        assert "messages" in found["c"].error.error.message
        used = server.request("GET", "/v1/usage").body
        assert used["completion_tokens"] >= found["a"].message.usage.output_tokens + 1
        later = batches.create(requests=[asked("d")])
        ended(client, later.id)
        assert [one.id for one in batches.list(limit=1)] == [later.id, made.id]  # page after page
        server.wait(lambda: not server.state.batches._in_hand)
        deleted = batches.delete(made.id)
        assert (deleted.id, deleted.type) == (made.id, "message_batch_deleted")
        with pytest.raises(anthropic.NotFoundError):
            batches.retrieve(made.id)
    with client_of(server) as other:
        assert list(other.batches.list()) == []
        assert len(list(other.files.list())) == 2  # of the later one
    store = server.state.batches.files
    sizes = [path.stat().st_size for path in store._place.iterdir() if path.suffix != ".json"]
    assert len(sizes) == 2 and store._bytes.held("") == sum(sizes)


def test_a_cancelled_batch(store_server):
    server = store_server(scheduler={"most": 1})
    with client_at(server) as client:
        batches = client.messages.batches
        made = batches.create(requests=[asked(str(i)) for i in range(5)])
        server.wait(lambda: any(run.counts().done for run in server.state.batches._runs.values()))
        with pytest.raises(anthropic.BadRequestError):
            batches.delete(made.id)
        answer = server.request("GET", f"/v1/messages/batches/{made.id}/results")
        assert answer.status == 404 and answer.body["error"]["type"] == "not_found_error"
        assert batches.cancel(made.id).processing_status in ("canceling", "ended")
        done = ended(client, made.id)
        assert done.cancel_initiated_at is not None
        assert (done.request_counts.succeeded, done.request_counts.canceled, done.request_counts.errored) == (1, 4, 0)
        kinds = sorted(one.result.type for one in batches.results(made.id))
        assert kinds == ["canceled"] * 4 + ["succeeded"]


def test_it_outlives_the_server_and_belongs_to_its_key(store_server):
    first = store_server(api_keys=["one", "two"], scheduler={"hold": True})
    with client_at(first, "one") as client:
        id = client.messages.batches.create(requests=[asked("a")]).id
        held = first.state.batches.files._bytes
        assert held.held(first.state.owners[0]) > 0 == held.held(first.state.owners[1])
    leave(first)
    second = store_server(api_keys=["one", "two"])
    with client_at(second, "one") as mine, client_at(second, "two") as theirs:
        assert ended(mine, id).request_counts.succeeded == 1
        batches = theirs.messages.batches
        assert list(batches.list()) == []
        for ask in (batches.retrieve, batches.cancel, batches.delete):
            with pytest.raises(anthropic.NotFoundError):
                ask(id)


def test_what_is_refused(store_server):
    server = store_server()
    with client_at(server) as client:
        for wrong in ([], [asked("a"), asked("a")], [asked("")], [asked("x" * 65)], [{"params": {}}]):
            with pytest.raises(anthropic.BadRequestError) as refused:
                client.messages.batches.create(requests=wrong)
            assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert not server.state.batches.files.all("")


def test_without_a_store(server):
    answer = server.post("messages/batches", requests=[asked("a")])
    assert answer.status == 404 and answer.body["error"]["type"] == "not_found_error"
