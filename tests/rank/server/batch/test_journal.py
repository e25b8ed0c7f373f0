"""The journal: one fsync for many, nothing lost, nothing half-written counted."""

import asyncio
import fcntl
import json
import os
import resource
import subprocess
import sys
import zlib

import msgspec
import pytest
from phalanx.errors import FatalError
from phalanx.rank.server.batch import journal as module
from phalanx.rank.server.batch.batch_input import fingerprint
from phalanx.rank.server.batch.journal import (
    ANSWERED,
    FAILED,
    HEADER,
    Entry,
    Header,
    Journal,
    pack,
    unpack,
)
from phalanx.rank.server.durable import atomically

SETUP = {"the model": "tiny", "the sampling": {}}


@pytest.fixture(autouse=True)
def quick(monkeypatch, request):
    if "share" not in request.node.name:
        monkeypatch.setattr(module, "GAP", 0)


@pytest.fixture
def place(tmp_path):
    (tmp_path / "in").write_text("requests\n")
    return tmp_path


def begin(place, setup=SETUP, **more):
    return Journal(str(place / "journal"), str(place / "in"), setup, **more)


def one(number, kind=ANSWERED):
    return Entry(kind, f"{number:032x}", f"{number + 1:016x}", "", number, 10, 20)


def write(journal, *numbers):
    async def main():
        await asyncio.gather(*(journal.add(one(number), b'{"n":%d}' % number) for number in numbers))
        await journal.flush()

    asyncio.run(main())


def numbers(journal):
    return [entry.line for entry, _, _ in journal.entries()]


def test_a_line_and_back():
    line = pack(one(3), b'{"text":"a\\tb"}')
    assert unpack(line) == (one(3), b'{"text":"a\\tb"}')
    for damaged in (line[:-1], line[:-5] + b"\n", line.replace(b"text", b"tent"), b"\0" * 20 + b"\n", b"\n", b"x\t\n"):
        assert unpack(damaged) is None


def test_what_is_added_is_found_again(place):
    journal = begin(place)
    write(journal, 1, 2, 3)
    journal.close()
    journal = begin(place)
    found = journal.recover()
    assert found.finished == {1: 2, 2: 3, 3: 4}
    assert (found.answered, found.failed, found.prompt_tokens, found.output_tokens) == (3, 0, 30, 60)
    assert (found.torn, found.damaged) == (0, 0)
    write(journal, 4)
    assert numbers(journal) == [1, 2, 3, 4]
    journal.close()


def test_lines_that_come_together_share_one_fsync(place, monkeypatch):
    count = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (count.append(fd), fsync(fd)))
    journal = begin(place)
    count.clear()
    write(journal, *range(500))
    assert 1 <= len(count) <= 3
    assert numbers(journal) == list(range(500))
    journal.close()


def test_add_returns_after_the_fsync(place, monkeypatch):
    """A client that has been told so may kill the job."""
    journal = begin(place)
    events = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), events.append("fsync")))

    async def main():
        await journal.add(one(1), b"{}")
        events.append("added")

    asyncio.run(main())
    assert events == ["fsync", "added"]
    journal.close()


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_last_line_is_cut_off(place, cut):
    journal = begin(place)
    write(journal, 1, 2)
    journal.close()
    path = place / "journal"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    journal = begin(place)
    found = journal.recover()
    assert list(found.finished) == [1] and found.torn > 0
    write(journal, 2)
    assert path.read_bytes() == whole
    journal.close()


def test_every_length_of_a_torn_journal_can_be_gone_on_with(place):
    journal = begin(place)
    write(journal, 1, 2)
    journal.close()
    path = place / "journal"
    whole = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    around = {end + by for end in ends for by in (-2, -1, 0, 1, 12) if end + by <= len(whole)}
    for length in sorted({*range(0, len(whole), 11), *around}):
        path.write_bytes(whole[:length])
        journal = begin(place)
        found = journal.recover()
        write(journal, *({1, 2} - set(found.finished)))
        assert sorted(numbers(journal)) == [1, 2]
        journal.close()


def test_a_damaged_line_in_the_middle_is_done_again(place):
    journal = begin(place)
    write(journal, 1, 2, 3)
    journal.close()
    path = place / "journal"
    path.write_bytes(path.read_bytes().replace(b'{"n":2}', b'{"n":9}'))
    journal = begin(place)
    found = journal.recover()
    assert list(found.finished) == [1, 3] and found.damaged == 1 and found.torn == 0
    journal.close()


def test_a_full_disk(place):
    """RLIMIT_FSIZE ends a write in the middle; what was there before stays, and nothing half-written counts."""
    journal = begin(place)
    write(journal, 1)
    size = (place / "journal").stat().st_size
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, old[1]))
    try:
        with pytest.raises(FatalError, match="File too large") as error:
            write(journal, 2)
        assert error.value.code == 1
        with pytest.raises(FatalError, match="File too large"):
            write(journal, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert (place / "journal").stat().st_size == size
    journal.close()
    journal = begin(place)
    assert list(journal.recover().finished) == [1]
    journal.close()


def test_a_disk_that_fails_to_sync(place, monkeypatch):
    journal = begin(place)
    size = (place / "journal").stat().st_size

    def broken(fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(FatalError, match="space left"):
            write(journal, 1)
    assert (place / "journal").stat().st_size == size
    journal.close()


def test_one_writer_at_a_time(place, monkeypatch):
    monkeypatch.setattr(module, "LOCK_PATIENCE", 0.2)
    journal = begin(place)
    with pytest.raises(FatalError, match="another job"):
        begin(place)
    journal.close()
    begin(place).close()


def test_a_job_that_is_just_ending_is_waited_for(place):
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print(flush=True); time.sleep(0.5)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(place / "journal")], stdout=subprocess.PIPE)
    assert holder.stdout.readline()
    begin(place).close()
    holder.communicate()


def test_a_file_system_without_locks(place, monkeypatch):
    def unsupported(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    begin(place).close()


def test_another_input_or_model_is_refused(place):
    begin(place).close()
    with pytest.raises(FatalError, match="'tiny'.*'large'") as error:
        begin(place, {**SETUP, "the model": "large"})
    assert error.value.code == 2
    (place / "in").write_text("other\n")
    with pytest.raises(FatalError, match="changed.*9 bytes.*6 now"):
        begin(place)
    journal = begin(place, overwrite=True)
    assert journal.recover().finished == {}
    journal.close()
    begin(place).close()


@pytest.mark.parametrize(("by", "words"), [
    (-1, "it was written by an older phalanx, which did not note the model's weights; give the old one back, or begin"),
    (1, "it was written by a newer phalanx"),
])  # fmt: skip
def test_another_version_is_refused(place, by, words):
    header = Header(fingerprint(str(place / "in")), SETUP, module.VERSION + by)
    (place / "journal").write_bytes(pack(Entry(HEADER), msgspec.json.encode(header)))
    with pytest.raises(FatalError, match=words) as stop:
        begin(place)
    assert stop.value.code == 2


@pytest.mark.parametrize("entry", [b'["h"]', b'["h",{"a":1},2]', b'["h","","","","x"]'])
@pytest.mark.parametrize("version", [1, 3])
def test_another_version_in_another_shape_is_named(place, entry, version):
    """Neither the entry nor the header can be read by this version, only their kind and version."""
    content = b'{"input":{"files":1},"version":%d}' % version if version > 2 else b'{"input":"in"}'
    rest = entry + b"\t" + content
    (place / "journal").write_bytes(b"%08x\t%s\n" % (zlib.crc32(rest), rest))
    with pytest.raises(FatalError, match="newer" if version > 2 else "older") as stop:
        begin(place)
    assert stop.value.code == 2


def test_a_header_of_this_version_that_cannot_be_read(place):
    (place / "journal").write_bytes(pack(Entry(HEADER), b'{"input":1,"setup":{},"version":%d}' % module.VERSION))
    with pytest.raises(FatalError, match="first line"):
        begin(place)


def test_a_file_that_is_no_journal_is_left_alone(place):
    (place / "journal").write_text("my diary\n")
    with pytest.raises(FatalError, match="no journal"):
        begin(place)
    assert (place / "journal").read_text() == "my diary\n"


def test_a_place_that_cannot_be_written(place):
    with pytest.raises(FatalError, match="journal .*No such file"):
        Journal(str(place / "none" / "journal"), str(place / "in"), SETUP)


def test_failed_requests_count_apart(place):
    journal = begin(place)
    asyncio.run(journal.add(one(1, FAILED), b"{}"))
    found = journal.recover()
    assert (found.answered, found.failed) == (0, 1)
    journal.remove()
    assert not (place / "journal").exists()
    journal.close()


def test_a_file_appears_at_once(place):
    path = place / "out"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomically(str(path)) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_text() == "old"
    with atomically(str(path)) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert sorted(os.listdir(place)) == ["in", "out"]


def test_a_journal_can_be_read_by_people(place):
    """docs/batch.md: cut -f3-"""
    journal = begin(place)
    write(journal, 1)
    journal.close()
    lines = (place / "journal").read_text().splitlines()
    assert [json.loads(line.split("\t", 2)[2]) for line in lines[1:]] == [{"n": 1}]
