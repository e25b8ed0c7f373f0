"""Copies of a model on a node: made once, whole or not at all, and in words where that fails."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from phalanx import errors
from phalanx.comm import mesh, threads
from phalanx.rank.model.load import load
from phalanx.rank.model.weights import local_copy as module
from phalanx.rank.model.weights.local_copy import make_local_copy

from ...checkpoints import make_checkpoint
from ...processes import wait

FILES = {"config.json", "generation_config.json", "model.safetensors.index.json"} | {
    f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
}


@pytest.fixture
def source(tmp_path):
    return make_checkpoint(tmp_path / "model", shards=3, num_hidden_layers=2)


@pytest.fixture
def scratch(tmp_path):
    return tmp_path / "made" / "scratch"


def contents(directory):
    return {f.name: f.read_bytes() for f in directory.iterdir() if f.name not in (".lock", ".copies")}


def stop(*arguments):
    with pytest.raises(errors.FatalError) as stopped:
        make_local_copy(*arguments)
    assert stopped.value.code == errors.USAGE
    return str(stopped.value)


def test_what_ranks_read_is_copied_once(source, scratch, monkeypatch):
    calls = []
    target, copied = make_local_copy(source, scratch, lambda done, total: calls.append((done, total)))
    assert target.parent == scratch and target.name.startswith("model-") and target.stat().st_mode & 0o777 == 0o700
    assert set(contents(target)) == FILES  # the tokenizer is the server's, which reads the original
    assert all((source / name).read_bytes() == data for name, data in contents(target).items())
    assert copied == sum((source / name).stat().st_size for name in FILES) and calls[-1] == (copied, copied)
    monkeypatch.setattr(module, "_Copy", None)
    assert make_local_copy(source, scratch) == (target, 0)
    (model,) = threads.run(lambda comm: load(target, mesh.build(comm, 1, 1)), 1)
    assert model.weight_bytes > 0


def test_another_directory_of_the_same_name_has_another_copy(source, scratch, tmp_path):
    other = Path(shutil.copytree(source, tmp_path / "elsewhere" / "model"))
    assert make_local_copy(source, scratch)[0] != make_local_copy(other, scratch)[0]


def test_what_has_changed_is_copied_again_and_what_is_gone_goes(source, scratch):
    target, _ = make_local_copy(source, scratch)
    second = source / "model-00002-of-00003.safetensors"
    second.write_bytes(second.read_bytes())  # the same bytes, but who knows
    (target / "model.safetensors").write_bytes(b"of an older checkpoint")
    (target / "model-00003-of-00003.safetensors.part").write_bytes(b"interrupted")
    assert make_local_copy(source, scratch) == (target, second.stat().st_size)
    assert set(contents(target)) == FILES


def test_a_file_system_may_keep_coarse_times(source, scratch):
    """FAT's are of two seconds; the copy's own time says nothing, and what it is a copy of is noted."""
    target, _ = make_local_copy(source, scratch)
    for file in target.iterdir():
        second = file.stat().st_mtime_ns // 2_000_000_000 * 2_000_000_000
        os.utime(file, ns=(second, second))
    assert make_local_copy(source, scratch) == (target, 0)


@pytest.mark.parametrize("text", ["", "[1]", '{"config.json": 7}'])
def test_a_note_that_is_broken_counts_as_none(source, scratch, text):
    target, copied = make_local_copy(source, scratch)
    (target / ".copies").write_text(text)
    assert make_local_copy(source, scratch) == (target, copied)
    assert make_local_copy(source, scratch) == (target, 0) and set(contents(target)) == FILES


def test_a_copy_that_was_cut_short_is_none(source, scratch):
    target, _ = make_local_copy(source, scratch)
    (target / "config.json").write_bytes(b"{")
    assert make_local_copy(source, scratch) == (target, (source / "config.json").stat().st_size)


def test_what_an_interrupted_copy_has_brought_is_kept(source, scratch, monkeypatch):
    last = (source / "model-00003-of-00003.safetensors").stat()

    def fail(fd, buffers, real=os.readv):
        if os.fstat(fd).st_ino == last.st_ino:
            (target,) = scratch.iterdir()
            assert not wait(lambda: len(json.loads((target / ".copies").read_text())) < 5, 20)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers)

    monkeypatch.setattr(module.os, "readv", fail)
    assert "model-00003-of-00003.safetensors cannot be copied: " in stop(source, scratch)
    monkeypatch.undo()
    assert make_local_copy(source, scratch)[1] == last.st_size


def test_a_file_that_changes_while_it_is_copied_is_copied_again(source, scratch, monkeypatch):
    config = source / "config.json"
    data = config.read_bytes()

    def slow(fd, buffers, real=os.readv):
        got = real(fd, buffers)
        if got and os.fstat(fd).st_ino == config.stat().st_ino:
            config.write_bytes(data[::-1])
            os.utime(config, ns=(1, 1))
        return got

    monkeypatch.setattr(module.os, "readv", slow)
    make_local_copy(source, scratch)
    monkeypatch.undo()
    target, copied = make_local_copy(source, scratch)
    assert copied == len(data) and (target / "config.json").read_bytes() == data[::-1]


def test_the_ranks_of_a_node_copy_once_together(source, scratch):
    found = threads.run(lambda comm: make_local_copy(source, scratch), 4)
    assert len({target for target, _ in found}) == 1
    assert sorted(copied > 0 for _, copied in found) == [False, False, False, True]


KILLED = r"""
import os, sys, time
from pathlib import Path
from phalanx.rank.model.weights import local_copy
real = os.readv
def slow(fd, buffers):
    os.write(1, b"reading\n")
    time.sleep(1000)
local_copy.os.readv = slow
local_copy.make_local_copy(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_killed_copy_is_no_copy(source, scratch):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(source), str(scratch)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"reading\n"
    waited = []
    waiter = threading.Thread(target=lambda: waited.append(make_local_copy(source, scratch)))
    waiter.start()
    time.sleep(0.3)  # without the lock that the other one holds it would be done in a few ms
    assert not waited
    process.kill()
    process.communicate()
    waiter.join(20)
    ((target, copied),) = waited
    assert copied > 0 and set(contents(target)) == FILES


def test_no_space(source, scratch, monkeypatch):
    real = shutil.disk_usage
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
    needed = sum((source / name).stat().st_size for name in FILES)
    assert re.search(f"{scratch}.*{needed / 1e9:.2f} GB.*copied", stop(source, scratch))
    monkeypatch.undo()

    def full(fd, data, real=os.write):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "write", full)
    message = stop(source, scratch)
    assert f"--stage {scratch}:" in message
    (target,) = scratch.iterdir()
    assert not contents(target)


def test_a_file_that_cannot_be_read(source, scratch, monkeypatch):
    def fail(fd, buffers):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(module.os, "readv", fail)
    said = stop(source, scratch)
    (name,) = re.findall(re.escape(f"--stage {scratch}: ") + r"(\S+) cannot be copied: Input/output error$", said)
    assert (source / name).exists()  # several are copied at once, and any may be the first that fails


def test_places_that_will_not_do(source, tmp_path, scratch):
    (tmp_path / "file").write_text("")
    assert re.search(f"{tmp_path}/file/deep: Not a directory", stop(source, tmp_path / "file" / "deep"))
    target, _ = make_local_copy(source, scratch)
    shutil.rmtree(target)
    target.symlink_to(source)
    assert re.search(f"{scratch}.*{target}.*not ours", stop(source, scratch))


def test_an_index_that_leads_into_another_directory(source, scratch):
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part/one.safetensors"}}))
    assert "part/one.safetensors" in stop(source, scratch)


def test_another_users_copy_is_not_trusted(source, scratch, monkeypatch):
    target, _ = make_local_copy(source, scratch)
    monkeypatch.setattr(module.os, "getuid", lambda: 12345)
    assert f"--stage {scratch}: {target}" in stop(source, scratch)
