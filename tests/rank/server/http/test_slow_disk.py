"""A disk that hangs or has lost something: the streams of others go on, and clients are told."""

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from phalanx.rank.server import file_store, kept_files
from phalanx.rank.server.http import endpoint

from .... import retries
from ....late import Late
from .batching import begin, client_of, line, put, until

openai = Late("openai")

pytestmark = [pytest.mark.timeout(300), retries.CLOCKS]
CHAT = "/v1/chat/completions"


class HungDisk:
    """Once it hangs, every fsync waits until it goes on."""

    def __init__(self, monkeypatch):
        self.waiting = 0
        self._go_on = threading.Event()
        self._go_on.set()
        fsync = os.fsync

        def slow(fd):
            if not self._go_on.is_set():
                self.waiting += 1
                assert self._go_on.wait(30)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", slow)

    @contextlib.contextmanager
    def hung(self):
        self.waiting = 0
        self._go_on.clear()
        try:
            yield
        finally:
            self._go_on.set()


@pytest.fixture
def disk(monkeypatch):
    return HungDisk(monkeypatch)


def stream_goes_on(server):
    """Whether a stream has all its events, of which one comes for each token."""
    events = server.events("chat/completions", messages="hi", max_tokens=20, ignore_eos=True)
    return len(events) > 10 and events[-1] == "[DONE]"


@pytest.mark.parametrize("what", ["an upload", "a batch", "a cancelled batch"])
def test_a_hung_disk_stops_no_stream(store_server, disk, what):
    server = store_server(scheduler={"pause": 0.001})
    with client_of(server) as client, ThreadPoolExecutor(1) as pool:
        file = put(client, line("a"))
        calls = {
            "an upload": lambda: put(client, line("b")),
            "a batch": lambda: client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
            "a cancelled batch": lambda: client.batches.cancel(waiting.id),
        }
        if what == "a cancelled batch":
            server.scheduler.most = len(server.scheduler.requests)  # the one before it stays
            until(client, begin(client, line("x")), "in_progress")
            waiting = begin(client, line("c"))
            server.scheduler.most = 1 << 30
        with disk.hung():
            done = pool.submit(calls[what])
            server.wait(lambda: disk.waiting)
            assert stream_goes_on(server) and server.request("GET", "/v1/files").status == 200
            assert not done.done()
        assert done.result(20).id


def test_a_hung_disk_at_the_end_of_a_batch_stops_no_stream(store_server, disk):
    server = store_server(scheduler={"pause": 0.001})
    finish = []

    with client_of(server) as client:
        batches = server.state.batches
        save = batches._save

        async def noted(batch):  # the state is on the disk that says that the files are written
            await save(batch)
            if batch.status == "finalizing":
                finish.append(hung.__enter__())

        batches._save = noted
        hung = disk.hung()
        batch = begin(client, line("a"))
        server.wait(lambda: finish and disk.waiting, 20)
        assert stream_goes_on(server) and client.batches.retrieve(batch.id).status == "finalizing"
        hung.__exit__(None, None, None)
        assert until(client, batch, "completed", "failed").status == "completed"


def test_more_clients_than_the_disk_has_threads(store_server, disk):
    server = store_server(scheduler={"pause": 0.001})
    with client_of(server) as client, ThreadPoolExecutor(24) as pool:
        with disk.hung():
            uploads = [pool.submit(put, client, line(str(i))) for i in range(24)]
            server.wait(lambda: disk.waiting == 8)
            assert stream_goes_on(server)
        assert len({one.result(20).id for one in uploads}) == 24


def test_a_file_whose_bytes_are_lost_is_told(store_server):
    server = store_server()
    files = server.state.batches.files
    with client_of(server) as client:
        file = put(client, line("a"))
        path = files.path(files.get(file.id, ""))
        before = path.read_bytes()
        path.write_bytes(b"")
        assert [client.files.retrieve(file.id).status, client.files.list().data[0].status] == ["error", "error"]
        for call in (
            lambda: client.files.content(file.id),
            lambda: client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.InternalServerError) as error:
                call()
            assert error.value.code == "file_damaged"
        assert not client.batches.list().data
        path.write_bytes(before.replace(b"hello", b"hallo"))  # as many
        with pytest.raises(openai.InternalServerError) as error:
            client.files.content(file.id)
        assert error.value.code == "file_damaged"
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert until(client, batch, "failed", "completed").errors.data[0].code == "file_damaged"
        path.write_bytes(before)
        assert client.files.content(file.id).content == before
        assert client.files.delete(file.id).deleted


def test_a_long_file_that_has_changed_does_not_come_whole(store_server, monkeypatch):
    monkeypatch.setattr(endpoint, "PIECE", 1 << 12)
    server = store_server()
    files = server.state.batches.files
    with client_of(server) as client:
        file = put(client, "x" * 100_000)
        assert len(client.files.content(file.id).content) == 100_000
        with open(files.path(files.get(file.id, "")), "r+b") as data:
            data.write(b"y")
        with pytest.raises(openai.APIConnectionError):
            client.files.content(file.id)


def test_an_upload_that_comes_is_counted_for_its_key(store_server, monkeypatch):
    for name, value in {"MAX_BYTES": 8 << 20, "FLOOR_BYTES": 1}.items():
        monkeypatch.setattr(file_store, name, value)
    server = store_server(api_keys=["one", "two"])
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * (3 << 20)
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 9000000\r\n\r\n"
    )
    store = server.state.batches.files
    owner = server.state.owners[0]
    with client_of(server, "one") as one, client_of(server, "two") as two:
        with contextlib.closing(socket.create_connection(("127.0.0.1", server.port))) as sock:
            sock.sendall(head.encode() + body)
            server.wait(lambda: store.left(owner) < 2 << 20, 20)
            with pytest.raises(openai.InternalServerError) as error:
                put(one, "x" * (2 << 20))
            assert (error.value.status_code, error.value.code) == (507, "files_full")
            assert put(two, "x" * (3 << 20)).bytes == 3 << 20
        server.wait(lambda: store.left(owner) == 4 << 20, 20)  # given up: nothing is left of it
        assert put(one, "x" * (3 << 20)).bytes == 3 << 20


def test_each_key_has_its_part_of_the_queue(store_server, monkeypatch):
    from phalanx.rank.server.batch import stored

    monkeypatch.setattr(stored, "MAX_BATCHES", 6)
    monkeypatch.setattr(stored, "FLOOR", 1)
    server = store_server(api_keys=["one", "two"], scheduler={"hold": True})
    with client_of(server, "one") as one, client_of(server, "two") as two:
        for _ in range(3):
            begin(one, line("a"))
        with pytest.raises(openai.RateLimitError) as error:
            begin(one, line("a"))
        assert error.value.code == "queue_full"
        batch = begin(two, line("a"))
        server.scheduler.hold = False
        until(two, batch, "completed")
        for _ in range(9):  # those of a key that has more are forgotten first
            until(one, begin(one, line("a")), "completed")
        assert two.batches.retrieve(batch.id).status == "completed" and len(one.batches.list().data) == 5


def test_a_batch_waits_where_its_answers_have_no_room_in_the_key_s_quota(store_server, monkeypatch):
    from phalanx.rank.server.batch import stored

    monkeypatch.setattr(stored, "TRY_AGAIN", 0.05)
    monkeypatch.setattr(file_store, "MAX_BYTES", 60_000)
    server = store_server()
    with client_of(server) as client:
        large = put(client, "x" * 50_000)
        batch = begin(client, *[line(f"r{i}") for i in range(20)])
        server.wait(lambda: server.state.batches._batches.get(batch.id).errors, 20)
        waiting = client.batches.retrieve(batch.id)
        assert waiting.errors.data[0].code == "files_full" and 0 < waiting.request_counts.completed < 20
        client.files.delete(large.id)
        done = until(client, batch, "completed", "failed")
        assert (done.status, done.request_counts.completed) == ("completed", 20)
        used = sum(one.bytes for one in client.files.list())
        assert server.state.batches.files.left("") == 60_000 - used  # the journal is counted no longer


def test_only_who_stores_something_waits_for_the_files_of_the_next_job(store_server, disk, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_files, "SAVED_WITHIN", 1000.0)
    server = store_server()
    for name in ("responses", "conversations"):
        getattr(server.state, name).files = kept_files.KeptFiles(tmp_path / name, 8, 1 << 20)
    stored = [("responses", {"input": "hi", "max_output_tokens": 16})]
    stored += [("chat/completions", {"messages": "hi", "max_tokens": 1, "record_conversation": True})]
    stored += [("conversations", {})]
    with ThreadPoolExecutor(3) as pool, disk.hung():
        waiting = [pool.submit(server.request, "POST", f"/v1/{path}", body) for path, body in stored]
        server.wait(lambda: disk.waiting == 2)
        plain = [("responses", {"input": "hi", "store": False}), ("chat/completions", {"messages": "hi"})]
        for path, body in plain:
            assert server.request("POST", f"/v1/{path}", body).status == 200
        assert not any(one.done() for one in waiting)
        disk._go_on.set()
        assert [one.result(20).status for one in waiting] == [200] * 3
