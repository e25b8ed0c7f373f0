"""A disk, or a store, that takes no more: it is told, and no answer of a batch is lost."""

import errno
import os
import time

import pytest
from phalanx.rank.server import file_store
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.batch import journal, output, stored
from phalanx.rank.server.http import upload

from .... import retries
from ....fields import each
from ....late import Late
from .batching import begin, client_of, line, put, read, until

openai = Late("openai")

pytestmark = [pytest.mark.timeout(300), retries.CLOCKS]
CHAT = "/v1/chat/completions"


def no_room(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_store(*_):
    raise ApiError(507, "no room")


def full_journal(fd, data, write=os.write):
    return no_room() if os.readlink(f"/proc/self/fd/{fd}").endswith(".journal") else write(fd, data)


def runs(fresh_server):
    """States of the batches in hand."""
    return list(fresh_server.state.batches._runs.values())


@pytest.mark.parametrize(
    ("place", "name", "broken"),
    [
        (journal.os, "write", full_journal),
        (output, "atomically", no_room),
        (file_store.FileStore, "new", full_store),
        (file_store.FileStore, "add", no_room),
    ],
    ids=["journal", "output", "store", "names"],
)
def test_a_batch_waits_for_room_and_loses_nothing(store_server, monkeypatch, place, name, broken):
    monkeypatch.setattr(stored, "TRY_AGAIN", 0.05)
    fresh_server = store_server(scheduler={"most": 2} if place is journal.os else {})
    with client_of(fresh_server) as client:
        file = put(client, *[line(f"r{i}") for i in range(4)])
        with monkeypatch.context() as patch:
            if place is not journal.os:
                patch.setattr(place, name, broken)
            batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            if place is journal.os:
                fresh_server.wait(lambda: any(run.counts().answered == 2 for run in runs(fresh_server)))
                patch.setattr(place, name, broken)
                fresh_server.scheduler.most = 1 << 30
            deadline = time.monotonic() + 20
            while not (waiting := client.batches.retrieve(batch.id)).errors:
                assert time.monotonic() < deadline and waiting.status not in ("failed", "completed"), waiting
                time.sleep(0.01)
            assert waiting.errors.data[0].code == "files_full"
        done = until(client, batch, "completed", "failed")
        assert (done.status, done.errors, done.request_counts.completed) == ("completed", None, 4)
        assert each(read(client, done.output_file_id), "custom_id") == [f"r{i}" for i in range(4)]
        assert len(client.files.list(purpose="batch_output").data) == 1
        fresh_server.wait(lambda: not list(fresh_server.state.batches.files.batches.glob("*.journal")))


def test_a_batch_whose_input_is_gone_waits_for_nothing(store_server, monkeypatch):
    monkeypatch.setattr(stored, "TRY_AGAIN", 0.05)
    fresh_server = store_server()
    with client_of(fresh_server) as client:
        file = put(client, line("a"))
        with monkeypatch.context() as patch:
            patch.setattr(output, "atomically", no_room)
            batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            fresh_server.wait(lambda: fresh_server.state.batches._batches.get(batch.id).errors)
            (fresh_server.state.batches.files._place / file.id).unlink()
            done = until(client, batch, "failed")
        assert done.errors.data[0].code == "file_damaged"
        assert until(client, begin(client, line("b")), "completed")


def test_a_full_disk_is_told(store_server, monkeypatch):
    fresh_server = store_server()
    place = fresh_server.state.batches.files._place
    with client_of(fresh_server) as client:
        file = put(client, line("a"))
        before = set(place.iterdir())
        monkeypatch.setattr(upload, "_private", lambda path, flags: os.open("/dev/full", os.O_WRONLY))
        with pytest.raises(openai.InternalServerError, match="file .*No space") as error:
            put(client, line("a"))  # which is found when what is buffered is written
        assert error.value.status_code == 507
        monkeypatch.undo()
        monkeypatch.setattr(file_store, "atomically", no_room)
        with pytest.raises(openai.InternalServerError, match="file .*No space"):
            put(client, line("a"))
        assert set(place.iterdir()) == before
        monkeypatch.setattr(stored, "atomically", no_room)
        with pytest.raises(openai.InternalServerError, match="batch .*No space") as error:
            client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert error.value.status_code == 507 and not client.batches.list().data
