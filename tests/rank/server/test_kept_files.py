"""Responses and conversations that the jobs of a service share: what one has ended, the next goes on from."""

import asyncio
import errno
import os
import stat
import threading

import msgspec
import pytest
from phalanx.rank.server import kept_files
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.conversation_store import ConversationStore
from phalanx.rank.server.kept_files import KeptFiles
from phalanx.rank.server.response_store import Kept, ResponseStore

OWNERS = ["ab" * 16, "cd" * 16]


def response_store(root, maker="", predecessor=""):
    store = ResponseStore(8, 2, OWNERS)
    store.files, store.maker = KeptFiles(root / "responses", 8, 1 << 20, predecessor), maker
    return store


def conversation_store(root):
    store = ConversationStore(8, OWNERS)
    store.files = KeptFiles(root / "conversations", 8, 1 << 20)
    return store


def answered(text, previous=None, key=0):
    kept = Kept(previous, [{"type": "message", "role": "user", "content": text}], key)
    output = msgspec.Raw(msgspec.json.encode([{"type": "message", "id": "msg_1", "content": text.upper()}]))
    kept.show({"id": "x", "status": "completed", "background": False, "instructions": "i" * 999, "output": output})
    return kept


def test_the_next_job_goes_on_from_a_response(tmp_path):
    async def run():
        old, new = response_store(tmp_path), response_store(tmp_path)
        first = answered("one")
        old.put("resp_1", first)
        old.put("resp_2", answered("two", first))
        await old.files.flush()
        found = await new.find("resp_2", 0)
        assert found.conversation == (await old.find("resp_2", 0)).conversation
        assert [one.get("content") for one in found.conversation] == ["one", "ONE", "two", "TWO"]
        assert found.body["background"] is False and not found.running and not found.elsewhere
        assert msgspec.json.decode(msgspec.json.encode(found.body))["instructions"] == "i" * 999
        assert abs(found.size - (await old.find("resp_2", 0)).size) < 1100
        with pytest.raises(ApiError):
            await new.find("resp_2", 1)  # another key's
        for odd in ("resp_../../etc/passwd", "../x", "resp_3", "x" * 5000, "resp_\0"):
            with pytest.raises(ApiError):
                await new.find(odd, 0)
        new.remove("resp_2", 0)
        await new.files.flush()
        with pytest.raises(ApiError):
            await response_store(tmp_path).find("resp_2", 0)

    asyncio.run(run())
    paths = [path for path in (tmp_path / "responses").rglob("*") if path.is_file()]
    assert len(paths) == 1 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)
    assert all(stat.S_IMODE(path.parent.stat().st_mode) == 0o700 for path in paths)


def test_one_that_the_job_before_is_making_is_seen_and_its_end_too(tmp_path):
    maker = tmp_path / "old.json"
    maker.write_text("{}")

    async def run():
        old, new = response_store(tmp_path, str(maker)), response_store(tmp_path)
        kept = answered("one")
        kept.body |= {"status": "in_progress", "background": True}
        old.begin("resp_1", kept)
        await old.files.flush()
        found = await new.find("resp_1", 0)
        assert found.body["status"] == "in_progress" and found.elsewhere
        kept.end({**kept.body, "status": "completed"})
        old.finish("resp_1", kept)
        await old.files.flush()
        found = await new.find("resp_1", 0)
        assert found.body["status"] == "completed" and not found.elsewhere
        other = answered("two")
        other.body |= {"status": "in_progress", "background": True}
        old.begin("resp_2", other)
        await old.files.flush()
        assert (await new.find("resp_2", 0)).elsewhere
        maker.unlink()  # the job that made it was killed
        found = await new.find("resp_2", 0)
        assert found.body["status"] == "failed" and "again" in found.body["error"]["message"]

    asyncio.run(run())


def test_what_the_job_before_may_be_about_to_write_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_files, "WAIT_EVERY", 0.01)
    predecessor = tmp_path / "old.json"
    predecessor.write_text("{}")

    async def run():
        old, new = response_store(tmp_path), response_store(tmp_path, predecessor=str(predecessor))
        waiting = asyncio.ensure_future(new.find("resp_1", 0))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        old.put("resp_1", answered("one"))
        assert (await waiting).body["status"] == "completed"
        predecessor.unlink()
        monkeypatch.setattr(kept_files, "PATIENCE", 1000.0)
        async with asyncio.timeout(20):
            with pytest.raises(ApiError):
                await new.find("resp_2", 0)

    asyncio.run(run())


def test_the_next_job_goes_on_with_a_conversation(tmp_path):
    def said(text):
        return {"type": "message", "role": "user", "content": text, "id": text}

    async def run():
        old, new = conversation_store(tmp_path), conversation_store(tmp_path)
        made = old.create(0, [said("a")], {"topic": "x"})
        turn = old.begin("my own id", 0)
        await old.files.flush()
        await new.load(made.id, 0)
        found = new.get(made.id, 0)
        assert (found.items, found.metadata, found.created) == (made.items, {"topic": "x"}, made.created)
        turn.end([said("b")])  # the old job ends an answer that it had begun
        new.change(made.id, 0, [said("c")])
        await old.files.flush()
        await new.load("my own id", 0)
        assert new.get("my own id", 0).items == [said("b")]
        old.change("my own id", 0, [said("b"), said("d")])
        await old.files.flush()
        await new.load("my own id", 0)  # changed since it was read
        assert len(new.get("my own id", 0).items) == 2
        await old.load(made.id, 0)
        assert old.get(made.id, 0).items == [said("c")]
        await new.load("my own id", 1)
        with pytest.raises(ApiError):
            new.get("my own id", 1)  # another key's
        new.remove(made.id, 0)
        await new.files.flush()
        await old.load(made.id, 0)
        with pytest.raises(ApiError):
            old.get(made.id, 0)

    asyncio.run(run())


def test_there_are_at_most_so_many_files_and_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_files, "TRIM_EVERY", 2)  # a look before each write that makes one more

    async def run():
        files = KeptFiles(tmp_path, 6, 1000)
        for number in range(20):
            files.put("aa", str(number), b"x" * 10)
            await files.flush()
            for at, path in enumerate(sorted((tmp_path / "aa").iterdir(), key=os.path.getmtime)):
                os.utime(path, (1000 + at, 1000 + at))
        files.put("bb", "mine", b"y" * 10)
        files.put("aa", "last", b"z")
        files.put("aa", "more", b"z")
        await files.flush()
        assert await files.get("bb", "mine") is not None  # whoever has most loses the oldest
        assert await files.get("aa", "0") is None
        assert await files.get("aa", "19") is not None
        assert len(list(tmp_path.glob("*/*"))) <= 7
        files.put("aa", "large", b"z" * 990)
        files.put("aa", "next", b"")
        files.put("aa", "next", b"")
        await files.flush()
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 1000

    asyncio.run(run())


def test_a_place_that_cannot_be_written_is_told_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")

    async def run():
        files = KeptFiles(tmp_path / "file", 6, 1000)
        for _ in range(3):
            files.put("aa", "1", b"x")
        await files.flush()

    asyncio.run(run())
    assert len([one for one in caplog.records if "cannot be kept" in one.getMessage()]) == 1


def said(text):
    return {"type": "message", "role": "user", "content": text, "id": text}


class Disk:
    """Writes go there once `go_on` is set, and then fails where there is an error."""

    def __init__(self, monkeypatch):
        self.error: OSError | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self.written: list[bytes] = []
        real = kept_files._write

        def write(path, content):
            assert self.go_on.wait(30)
            if self.error is not None:
                raise self.error
            self.written.append(content)
            real(path, content)

        monkeypatch.setattr(kept_files, "_write", write)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_a_full_disk_loses_no_conversation_that_is_in_memory(tmp_path, disk):
    async def run():
        store = conversation_store(tmp_path)
        old = store.create(0, [said("a")], {})
        await store.files.flush()
        disk.error = OSError(errno.ENOSPC, "no space")
        new = store.create(0, [said("b")], {})
        store.change(old.id, 0, [said("a"), said("c")])
        await store.files.flush()
        for id, number in ((new.id, 1), (old.id, 2)):
            await store.load(id, 0)
            assert len(store.get(id, 0).items) == number
        disk.error = None
        store.change(new.id, 0, [said("b"), said("d")])
        await store.files.flush()
        later = conversation_store(tmp_path)
        await later.load(new.id, 0)
        assert len(later.get(new.id, 0).items) == 2

    asyncio.run(run())


@pytest.mark.parametrize("size", [0, 9])
def test_a_damaged_file_is_as_none(tmp_path, size, caplog):
    async def run():
        conversations, responses = conversation_store(tmp_path), response_store(tmp_path)
        made = conversations.create(0, [said("a")], {})
        responses.put("resp_1", answered("one"))
        await conversations.files.flush()
        await responses.files.flush()
        for path in tmp_path.glob("*/*/*"):
            path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(ApiError, match="no response"):
            await response_store(tmp_path).find("resp_1", 0)
        later = conversation_store(tmp_path)
        await later.load(made.id, 0)
        with pytest.raises(ApiError, match="no conversation"):
            later.get(made.id, 0)
        await conversations.load(made.id, 0)
        assert conversations.get(made.id, 0).items == [said("a")]

    asyncio.run(run())
    assert sum("damaged" in one.getMessage() for one in caplog.records) == 3


def test_a_file_is_on_the_disk_before_it_takes_the_place_of_the_last(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: (calls.append(name), real(*given)))

    async def run():
        files = KeptFiles(tmp_path, 6, 1000)
        assert await files.put("aa", "1", b"x")

    asyncio.run(run())
    assert calls[:2] == ["fsync", "replace"]


def test_what_waits_for_a_slow_disk_is_bounded_for_each_key(tmp_path, monkeypatch, disk, caplog):
    monkeypatch.setattr(kept_files, "WAITING_BYTES", 1000)
    monkeypatch.setattr(kept_files, "WAITING_FLOOR", 0)

    async def run():
        files = KeptFiles(tmp_path, 100, 1 << 20, keys=2)
        disk.go_on.clear()
        puts = [files.put("aa", str(number), b"x" * 100) for number in range(9)]
        other = files.put("bb", "1", b"y" * 400)
        for number in range(20):
            last = files.put("bb", "2", b"%02d" % number)
        assert not await files.flush(0.01)
        assert [one.done() for one in puts] == [False] * 5 + [True] * 4 and not puts[-1].result()
        files.drop("aa", "1")
        disk.go_on.set()
        assert await files.flush() and await other and await last
        assert [await one for one in puts] == [True] * 5 + [False] * 4
        assert await files.get("aa", "1") is None
        assert (await files.get("bb", "2"))[0] == b"19"
        assert await files.put("aa", "large", b"x" * 2000)  # one may be as large as it can
        assert len(disk.written) == 7

    asyncio.run(run())
    assert sum("too slow" in one.getMessage() for one in caplog.records) == 1


def test_who_stores_waits_only_so_long_for_the_disk_and_what_is_not_written_yet_is_in_memory(
    tmp_path, monkeypatch, disk
):
    monkeypatch.setattr(kept_files, "SAVED_WITHIN", 0.01)

    async def run():
        store = conversation_store(tmp_path)
        disk.go_on.clear()
        made = store.create(0, [said("a")], {})
        await store.saved(made.id, 0)
        await store.load(made.id, 0)
        assert store.get(made.id, 0).items == [said("a")] and not made.saved.done()
        disk.go_on.set()
        assert await made.saved

    asyncio.run(run())
