"""Files and batches over HTTP, mostly through OpenAI's own client."""

import asyncio
import re
import socket
import time

import pytest
from phalanx.rank.server.batch import idle, stored, stored_run
from phalanx.rank.server.http import upload

from ....fields import each
from ....late import Late
from ..conftest import LiveServer
from .batching import begin, client_of, leave, line, put, read, until

openai = Late("openai")

pytestmark = pytest.mark.timeout(300)


def codes(errors):
    return {one["error"]["code"] for one in errors}


@pytest.fixture(scope="module")
def server(tmp_path_factory, model_dir, tokenizer):
    place = tmp_path_factory.mktemp("server")
    fresh_server = LiveServer(
        place, model_dir, tokenizer, True, {}, served_model_name="tiny", file_store=str(place / "store")
    )
    fresh_server.call(fresh_server.state.batches.start)
    yield fresh_server
    leave(fresh_server)


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


def test_a_file_comes_back_as_it_was(server, client, tmp_path):
    data = bytes(range(256)) * (3 << 12)  # some megabytes: it is written in pieces
    (tmp_path / "naïve .jsonl").write_bytes(data)
    with open(tmp_path / "naïve .jsonl", "rb") as source:
        file = client.files.create(file=source, purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(data), "naïve .jsonl", "batch", "processed")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == data
    assert client.files.list().data[0] == file and not client.files.list(purpose="batch_output").data
    where = server.state.batches.files.path(server.state.batches.files.get(file.id, ""))
    assert where.stat().st_mode & 0o777 == 0o600 and where.parent.stat().st_mode & 0o777 == 0o700
    assert client.files.delete(file.id).deleted and not where.exists()
    with pytest.raises(openai.NotFoundError, match="no file"):
        client.files.content(file.id)


def test_lists_come_in_pages(client):
    files = [put(client, line("a"), name=f"{i}.jsonl") for i in range(3)]
    assert [one.id for one in client.files.list(order="asc", limit=2)][-3:] == [one.id for one in files]
    page = client.files.list(limit=1, after=files[2].id)
    assert [one.id for one in page.data] == [files[1].id] and page.has_more
    for limit in ("0", "x", "0" * 8 + "1" * 5000):  # more digits than int() reads
        with pytest.raises(openai.BadRequestError, match="limit is"):
            client.files.list(extra_query={"limit": limit})


def figures(server):
    """Sequences that ended, their tokens, and how many times to a first token were counted."""
    told = server.request("GET", "/metrics").body.decode()
    names = (
        'phalanx_requests_total{finish_reason="stop"}',
        "phalanx_request_output_tokens_sum",
        "phalanx_time_to_first_token_seconds_count",
    )
    found = [re.search(rf"^{re.escape(name)} (\S+)$", told, re.MULTILINE) for name in names]
    return [float(one[1]) if one else 0.0 for one in found]


def test_a_batch(server, client):
    before = figures(server)
    batch = begin(client, line("a"), line("b"), line("c", {"messages": "hi", "n": 0}), metadata={"k": "v"})
    assert (batch.status, batch.metadata, batch.expires_at - batch.created_at) == ("validating", {"k": "v"}, 86400)
    done = until(client, batch, "completed", "failed")
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 3, 2, 1)
    assert done.in_progress_at and done.finalizing_at and done.completed_at and not done.errors
    answers = read(client, done.output_file_id)
    assert each(answers, "custom_id") == ["a", "b"]
    assert answers[0]["response"]["body"]["choices"][0]["message"]["content"].startswith("hello world")
    (error,) = read(client, done.error_file_id)
    assert (
        error["custom_id"] == "c" and error["response"]["status_code"] == 400 and "n is 0" in error["error"]["message"]
    )
    assert done.usage.output_tokens > 0 and done.usage.total_tokens > done.usage.output_tokens
    assert client.batches.list(limit=1).data[0].id == batch.id
    file = client.files.retrieve(done.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", "in_output.jsonl")
    assert not list(server.state.batches.files.batches.glob("*.journal"))
    assert server.scheduler.requests[-1].priority == stored_run.LAST
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.batches.cancel(batch.id)
    assert [now - then for now, then in zip(figures(server), before, strict=True)] == [2, done.usage.output_tokens, 0]
    used = server.request("GET", "/v1/usage").body
    assert used["completion_tokens"] >= done.usage.output_tokens


def test_metrics_count_unfinished_batches_and_ended_requests(store_server):
    server = store_server(scheduler={"hold": True})

    def shown():
        page = server.request("GET", "/metrics").body.decode()
        names = ("batches_unfinished", "batch_requests_total")
        return [float(re.search(rf"^phalanx_{name} (\S+)$", page, re.MULTILINE)[1]) for name in names]

    with client_of(server) as client:
        batch = begin(client, line("a"), line("b"))
        assert shown() == [1, 0]
        server.wait(lambda: len(server.scheduler.requests) == 2)
        server.scheduler.hold = False
        until(client, batch, "completed")
        assert shown() == [0, 2]


def test_embeddings_and_names_twice_in_a_file(client):
    body = {"input": "hello"}
    batch = begin(client, line("a", body, "/v1/embeddings"), endpoint="/v1/embeddings", completion_window="2h")
    done = until(client, batch, "completed", "failed")
    assert read(client, done.output_file_id)[0]["response"]["body"]["data"][0]["embedding"]
    assert done.error_file_id is None


def test_responses(server, client):
    """None is kept, so none can go on from another."""
    kept = len(server.state.responses._kept)
    lines = [
        line("a", {"input": "hello", "max_output_tokens": 1}, "/v1/responses"),
        line("b", {"input": "hello", "top_logprobs": 1}, "/v1/responses"),
        line("c", {"input": "hello", "background": True}, "/v1/responses"),
        line("d", {"input": "hello", "previous_response_id": "resp_1"}, "/v1/responses"),
    ]
    done = until(client, begin(client, *lines, endpoint="/v1/responses"), "completed", "failed")
    first, second = (one["response"]["body"] for one in read(client, done.output_file_id))
    assert (first["object"], first["status"], first["store"]) == ("response", "incomplete", False)
    assert second["output"][0]["content"][0]["text"] == "hello world" and second["output"][0]["content"][0]["logprobs"]
    wrong = [one["response"]["body"]["error"]["param"] for one in read(client, done.error_file_id)]
    assert wrong == ["background", "previous_response_id"]
    assert done.usage.output_tokens == 1 + second["usage"]["output_tokens"]
    assert server.scheduler.requests[-1].priority == stored_run.LAST and len(server.state.responses._kept) == kept


def test_a_file_that_is_no_batch_fails_with_its_lines(client):
    batch = begin(client, line("a"), "{", line("a"), line("b", url="/v1/embeddings", body={"input": "x"}))
    done = until(client, batch, "completed", "failed")
    assert done.status == "failed" and done.failed_at and done.output_file_id is None
    assert [(one.line, one.code) for one in done.errors.data] == [
        (2, "invalid_json"), (3, "duplicate"), (4, "mismatched_endpoint"),
    ]  # fmt: skip
    empty = until(client, begin(client, ""), "completed", "failed")
    assert [one.code for one in empty.errors.data] == ["empty_file"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"endpoint": "/v1/tokenize"}, "endpoint is"),
        ({"completion_window": "1y"}, "expected 24h"),
        ({"completion_window": "999d"}, "expected 24h"),
        ({"metadata": {"k": "v" * 600}}, "at most 512"),
        ({"extra_body": {"output_expires_after": {"anchor": "created_at", "seconds": 3600}}}, "output_expires_after"),
    ],
)
def test_batches_that_are_refused(client, change, words):
    with pytest.raises(openai.BadRequestError, match=words):
        begin(client, line("a"), **{"endpoint": "/v1/chat/completions", **change})


def test_unknown_files_and_batches(client):
    with pytest.raises(openai.NotFoundError, match="no file"):
        client.batches.create(input_file_id="file-x", endpoint="/v1/chat/completions", completion_window="24h")
    with pytest.raises(openai.NotFoundError, match="no batch"):
        client.batches.retrieve("batch_x")
    with pytest.raises(openai.NotFoundError, match="no batch"):
        client.batches.cancel("batch_x")


def form(*parts, end=b"--x--\r\n"):
    return b"".join(b"--x\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % one for one in parts) + end


def test_only_own_leftovers_are_removed(tmp_path):
    from phalanx.rank.server.file_store import FileStore

    place = tmp_path / "files"
    (place / "photos").mkdir(parents=True)
    cut_off = "file-" + "0a" * 12
    for name in ("letter.txt", "file-list", cut_off, f".{cut_off}.json.part"):
        (place / name).write_text("x")
    FileStore(str(tmp_path)).close()
    assert {path.name for path in place.iterdir()} == {"photos", "letter.txt", "file-list"}


PURPOSE, FILE = (b'name="purpose"', b"batch"), (b'name="file"; filename="a.jsonl"', b"{}")
MULTIPART = {"Content-Type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (form(PURPOSE, FILE), {"Content-Type": "application/json"}, 415, "multipart/form-data"),
        (b"nothing", MULTIPART, 400, "no multipart form"),
        (form(PURPOSE, FILE, end=b""), MULTIPART, 400, "cut off"),
        (form(PURPOSE), MULTIPART, 400, "file is missing"),
        (form(FILE), MULTIPART, 400, "purpose is missing"),
        (form((b'name="purpose"', b"vision"), FILE), MULTIPART, 400, 'purpose is "vision"'),
        (form((b'name="expires_after[seconds]"', b"3600"), PURPOSE, FILE), MULTIPART, 400, "expires_after"),
        (form((b'name="purpose"', b"x" * 2000), FILE), MULTIPART, 400, "longer than 1024"),
        (form(PURPOSE, FILE, FILE), MULTIPART, 400, "twice"),
        (form((b'name="' + b"x" * 9000 + b'"', b"")), MULTIPART, 400, "Maximum header size"),
        (form(*[(b'name="f%d"' % i, b"") for i in range(20)]), MULTIPART, 400, "more than 16 parts"),
        (form(*[PURPOSE] * 20), MULTIPART, 400, "more than 16 parts"),
    ],
)
def test_forms_that_are_refused_leave_nothing(server, body, headers, status, words):
    before = set(server.state.batches.files._place.iterdir())
    answer = server.request("POST", "/v1/files", body, headers)
    assert answer.status == status and words in answer.body["error"]["message"]
    assert set(server.state.batches.files._place.iterdir()) == before


def test_too_large_and_given_up(server, monkeypatch):
    monkeypatch.setattr(upload, "MAX_FILE", 1 << 20)
    before = set(server.state.batches.files._place.iterdir())
    big = (FILE[0], b"x" * (3 << 20))
    answer = server.request("POST", "/v1/files", form(PURPOSE, big), MULTIPART)
    assert answer.status == 413 and "1 MiB" in answer.body["error"]["message"]

    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: {MULTIPART['Content-Type']}\r\n"
        sock.sendall(f"{head}Content-Length: 9000000\r\n\r\n".encode() + form(PURPOSE, big)[:1000000])
    server.wait(lambda: set(server.state.batches.files._place.iterdir()) == before)


def test_a_full_store(server, client, monkeypatch):
    monkeypatch.setattr(server.state.batches.files._number, "quota", 0)
    with pytest.raises(openai.InternalServerError, match="delete some") as error:
        put(client, line("a"))
    assert error.value.status_code == 507


def test_off_unless_a_directory_is_named(fresh_server):
    for method, path in (("GET", "files"), ("POST", "files"), ("GET", "batches/x"), ("GET", "files/x/content")):
        answer = fresh_server.request(method, f"/v1/{path}", b"" if method == "POST" else None)
        assert answer.status == 404 and "--file-store DIR" in answer.body["error"]["message"]


def test_keys_see_their_own(store_server):
    fresh_server = store_server(api_keys=["one", "two"])
    with client_of(fresh_server, "one") as one, client_of(fresh_server, "two") as two:
        batch = begin(one, line("a"))
        assert not two.files.list().data and not two.batches.list().data
        for call in (two.files.retrieve, two.files.content, two.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(batch.input_file_id)
        with pytest.raises(openai.NotFoundError):
            two.batches.retrieve(batch.id)
        assert until(one, batch, "completed").output_file_id
    with client_of(fresh_server, "three") as nobody, pytest.raises(openai.AuthenticationError):
        put(nobody, line("a"))


def test_cancelled_while_it_runs(store_server):
    fresh_server = store_server(scheduler={"most": 1})
    with client_of(fresh_server) as client:
        batch = begin(client, *[line(f"r{i}") for i in range(8)])
        batch = until(client, batch, "in_progress")
        fresh_server.wait(lambda: len(fresh_server.scheduler.requests) > 1)
        with pytest.raises(openai.BadRequestError, match="is the input of"):
            client.files.delete(batch.input_file_id)
        waiting, given_up = begin(client, line("z")), begin(client, line("y"), line("x"))
        client.batches.cancel(given_up.id)  # in the queue: it does not wait for its turn
        done = until(client, given_up, "cancelled")
        assert (done.request_counts.total, done.request_counts.failed) == (2, 2)
        assert each(read(client, done.error_file_id), "custom_id") == ["y", "x"]
        assert client.batches.retrieve(batch.id).status == "in_progress"
        assert client.batches.cancel(batch.id).status == "cancelling"
        done = until(client, batch, "cancelled")
        assert done.cancelling_at and done.cancelled_at and done.request_counts.total == 8
        errors = read(client, done.error_file_id)
        answers = read(client, done.output_file_id) if done.output_file_id else []
        assert codes(errors) == {"batch_cancelled"}
        assert sorted(each(errors + answers, "custom_id")) == [f"r{i}" for i in range(8)]
        fresh_server.wait(lambda: fresh_server.link.open_sequences <= 1)
        fresh_server.scheduler.most = 1 << 30
        assert until(client, waiting, "completed")


def test_strict_holds_for_the_lines_of_a_batch(store_server):
    with client_of(store_server(strict=True)) as client:
        bodies = [{"messages": "hi", **more} for more in ({}, {"no_such_field": 5}, {"model": "llama7b"})]
        done = until(client, begin(client, *map(line, "abc", bodies)), "completed", "failed")
        errors = read(client, done.error_file_id)
        assert each(errors, "custom_id") == ["b", "c"]
        assert done.request_counts.completed == 1
        assert [one["response"]["status_code"] for one in errors] == [400, 404]
        assert "no_such_field is no field" in errors[0]["error"]["message"]


def test_expired(store_server):
    fresh_server = store_server(scheduler={"hold": True})
    with client_of(fresh_server) as client:
        batch = begin(client, line("a"), line("b"))
        until(client, batch, "in_progress")
        fresh_server.wait(lambda: fresh_server.scheduler.requests)
        (run,) = fresh_server.state.batches._runs.values()
        fresh_server.call(run.stop)  # as its timer does
        done = until(client, batch, "expired")
        assert done.expired_at and done.request_counts.failed == 2
        assert codes(read(client, done.error_file_id)) == {"batch_expired"}


def test_expired_in_the_queue(store_server, monkeypatch):
    monkeypatch.setattr(stored, "LOOK_EVERY", 0.05)
    fresh_server = store_server(scheduler={"hold": True})
    with client_of(fresh_server) as client:
        first, waiting = begin(client, line("a")), begin(client, line("b"), line("c"))
        until(client, first, "in_progress")
        fresh_server.wait(lambda: fresh_server.scheduler.requests)
        fresh_server.state.batches._batches.get(waiting.id).expires_at = int(time.time())
        done = until(client, waiting, "expired")
        assert (done.request_counts.total, done.request_counts.failed) == (2, 2)
        assert codes(read(client, done.error_file_id)) == {"batch_expired"}
        assert client.batches.retrieve(first.id).status == "in_progress"
        assert len(fresh_server.scheduler.requests) == 1


def test_another_server_goes_on_where_one_was_stopped(store_server):
    fresh_server = store_server(scheduler={"most": 2})
    with client_of(fresh_server) as client:
        batch = begin(client, *[line(f"r{i}") for i in range(6)])
        deadline = time.monotonic() + 20
        while client.batches.retrieve(batch.id).request_counts.completed < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    leave(fresh_server)
    again = store_server()
    with client_of(again) as client:
        done = until(client, batch, "completed", "failed")
        assert done.status == "completed" and done.request_counts.completed == 6
        assert each(read(client, done.output_file_id), "custom_id") == [f"r{i}" for i in range(6)]
    assert len(again.scheduler.requests) == 4


def test_a_server_that_ends_while_it_writes_the_files(store_server, monkeypatch):
    def interrupted(*_):
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(stored_run.StoredRun, "finish", interrupted)
        fresh_server = store_server()
        with client_of(fresh_server) as client:
            batch = begin(client, line("a"), line("b"))
            until(client, batch, "finalizing")
        leave(fresh_server)
    again = store_server()
    with client_of(again) as client:
        done = until(client, batch, "completed", "expired", "failed")
        assert done.status == "completed" and done.request_counts.completed == 2, done.errors
    assert not again.scheduler.requests


def test_another_model_does_not_go_on(store_server):
    fresh_server = store_server(scheduler={"hold": True})
    with client_of(fresh_server) as client:
        batch = begin(client, line("a"))
        until(client, batch, "in_progress")
    leave(fresh_server)
    again = store_server(served_model_name="other")
    with client_of(again) as client:
        done = until(client, batch, "completed", "failed")
        assert done.status == "failed" and "the model was 'tiny'" in done.errors.data[0].message
        assert read(client, done.error_file_id)[0]["error"]["code"] == "batch_failed"


def test_live_requests_go_first(store_server, monkeypatch):
    monkeypatch.setattr(idle, "LOOK_EVERY", 0.01)
    fresh_server = store_server(scheduler={"hold": True})  # of four places three are for batches
    with client_of(fresh_server) as client:
        begin(client, *[line(f"r{i}") for i in range(8)])
        fresh_server.wait(lambda: len(fresh_server.scheduler.requests) == 3)
        time.sleep(0.1)  # a fourth would have come: it is looked for every 10 ms
        assert len(fresh_server.scheduler.requests) == 3


def test_no_directory(tmp_path, model_dir, tokenizer, store_server):
    from phalanx.errors import FatalError
    from phalanx.rank.server import file_store

    (tmp_path / "file").write_text("")
    with pytest.raises(FatalError, match="--file-store.*directory"):
        file_store.FileStore(str(tmp_path / "file" / "x"))
    store_server()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(FatalError, match="another server uses it"):
        patch.setattr(file_store, "LOCK_PATIENCE", 0)
        file_store.FileStore(str(tmp_path / "store"))
