"""The store of files: what it certifies is on the disk, what is lost is told, and each key has its quota."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest
from phalanx.errors import FatalError
from phalanx.rank.server import file_store
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.file_store import FileStore, StoreInUse


@pytest.fixture
def make_store(tmp_path):
    stores = []

    def make(keys=1):
        while stores:
            stores.pop().close()
        stores.append(FileStore(str(tmp_path), keys))
        return stores[-1]

    yield make
    for one in stores:
        one.close()


def stored(store, content=b"{}", owner=""):
    file = store.new("a.jsonl", "batch", owner)
    store.grow(file, len(content))
    store.path(file).write_bytes(content)
    store.add(file)
    return file


def test_the_bytes_are_on_the_disk_before_anything_says_so(make_store, monkeypatch):
    synced, fsync = [], os.fsync

    def noted(fd):
        fsync(fd)
        synced.append((os.path.basename(os.readlink(f"/proc/self/fd/{fd}")), os.fstat(fd).st_size))

    monkeypatch.setattr(os, "fsync", noted)
    store = make_store()
    file = stored(store, b"x" * 7779)
    names = [name for name, _ in synced]
    assert names == [file.id, "files", f".{file.id}.json.part", "files"] and synced[0] == (file.id, 7779)


def test_a_disk_that_fails_certifies_nothing(make_store, monkeypatch):
    def failing(fd):
        raise OSError(5, "I/O error")

    store = make_store()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="I/O"):
        patch.setattr(os, "fsync", failing)
        stored(store)
    assert store.all("") == []
    assert not list((store.root / "files").glob("*.json"))
    assert make_store().all("") == []
    assert not list((store.root / "files").iterdir())


def test_what_was_lost_is_told_after_a_restart(make_store, caplog):
    store = make_store()
    lost, cut, changed, whole = (stored(store, b"0123456789") for _ in range(4))
    store.path(lost).unlink()
    store.path(cut).write_bytes(b"")
    store.path(changed).write_bytes(b"0123456788")
    again = make_store()
    assert {one.id for one in again.all("")} == {one.id for one in (lost, cut, changed, whole)}
    assert sum(one.id in caplog.text for one in (lost, cut)) == 2 and whole.id not in caplog.text
    assert "no longer there" in again.wrong(lost)
    assert "0 bytes" in again.wrong(cut)
    assert again.wrong(whole) == ""
    assert again.get(cut.id, "").body(again.wrong(cut))["status"] == "error"
    for one in (lost, cut, changed):
        with pytest.raises(ApiError) as error:
            again.check_whole(again.get(one.id, ""))
        assert (error.value.status, error.value.code) == (500, "file_damaged")
    again.check_whole(again.get(whole.id, ""))
    again.drop(again.get(lost.id, ""))
    assert len(again.all("")) == 3


def test_a_file_of_an_earlier_server_has_no_digest(make_store):
    store = make_store()
    file = stored(store)
    about = store.root / "files" / f"{file.id}.json"
    about.write_text(about.read_text().replace(f',"digest":"{file.digest}"', ""))
    again = make_store()
    (old,) = again.all("")
    assert old.digest == ""
    again.check_whole(old)


def test_what_cannot_be_read_of_a_file_removes_no_bytes(make_store):
    store = make_store()
    file = stored(store)
    (store.root / "files" / f"{file.id}.json").write_text("{")
    assert make_store().all("") == [] and store.path(file).exists()


@pytest.fixture
def small(monkeypatch):
    for name, value in {"MAX_FILES": 8, "MAX_BYTES": 800, "FLOOR_FILES": 1, "FLOOR_BYTES": 1}.items():
        monkeypatch.setattr(file_store, name, value)


def test_each_key_has_its_quota_of_files_and_bytes(make_store, small):
    store = make_store(keys=2)
    mine = [stored(store, owner="a") for _ in range(4)]
    with pytest.raises(ApiError) as error:
        stored(store, owner="a")
    assert (error.value.status, error.value.code) == (507, "files_full")
    stored(store, b"x" * 400, owner="b")
    with pytest.raises(ApiError, match="delete some"):
        stored(store, owner="b")  # its bytes are used up
    again = make_store(keys=2)  # counts what is there
    with pytest.raises(ApiError):
        stored(again, owner="a")
    again.drop(again.get(mine[0].id, "a"))
    again.drop(mine[0])  # twice: it is given back once
    stored(again, owner="a")
    with pytest.raises(ApiError):
        stored(again, owner="a")


def test_what_is_being_written_is_counted(make_store, small):
    store = make_store(keys=2)
    coming = store.new("a", "batch", "a")
    store.grow(coming, 300)
    other = store.new("b", "batch", "a")
    with pytest.raises(ApiError, match="delete some"):
        store.grow(other, 101)
    store.grow(store.new("c", "batch", "b"), 400)
    store.drop(coming)
    store.grow(other, 101)
    store.count("batch_1", "a", 299)  # as a journal is, whatever its size
    assert store.left("a") == 0
    store.uncount("batch_1")
    store.uncount("batch_1")
    assert store.left("a") == 299


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_jobs_that_take_turns_need_locks(tmp_path, monkeypatch, number):
    def failing(*_):
        raise OSError(number, os.strerror(number))

    file_store.require_locks(str(tmp_path))
    held = FileStore(str(tmp_path), locked=True)
    file_store.require_locks(str(tmp_path))  # the job before has it
    held.close()
    monkeypatch.setattr(fcntl, "flock", failing)
    FileStore(str(tmp_path)).close()  # a server alone
    with pytest.raises(FatalError, match=os.strerror(number)) as refused:
        file_store.require_locks(str(tmp_path))
    assert "--file-store" in str(refused.value) and "--resubmit" in str(refused.value)
    with pytest.raises(StoreInUse, match=os.strerror(number)):
        FileStore(str(tmp_path), locked=True)
