"""Striped loading: the same weights as direct loading, and each byte read once."""

import errno
import json
import logging
import os
import re
import socket
import threading
import time

import pytest
import torch
from phalanx import errors
from phalanx.comm import mesh, threads
from phalanx.rank import filesystems
from phalanx.rank.model import load as load_module
from phalanx.rank.model.load import load
from phalanx.rank.model.weights import striped
from phalanx.rank.safetensors_header import Entry, read_index
from safetensors.torch import load_file, save_file

ODD = {"vocab_size": 509, "intermediate_size": 97}  # prime: no degree divides them, so the last rank is padded


def load_on(path, tp=1, pp=1, replicas=1, **options):
    return threads.run(lambda comm: load(path, mesh.build(comm, tp, pp), **options), tp * pp * replicas)


def same(path, tp, pp, replicas=1, **options):
    striped_ones, direct_ones = (load_on(path, tp, pp, replicas, way=way, **options) for way in ("striped", "direct"))
    for a, b in zip(striped_ones, direct_ones, strict=True):
        mine, theirs = dict(a.named_parameters()), dict(b.named_parameters())
        assert list(mine) == list(theirs)
        for name in mine:
            assert mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]), name


@pytest.fixture
def small_chunks(monkeypatch):
    """Many rounds, and chunks that end within tensors."""
    monkeypatch.setattr(striped, "CHUNK", 3001)


@pytest.mark.sample(5)
@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3)])
@pytest.mark.parametrize("made", [
    {**ODD},
    {**ODD, "tie_word_embeddings": True, "dtype": "bfloat16"},
    {"model_type": "qwen3", "shards": 3, "attention_bias": True, "dtype": "float16"},
], ids=["untied", "tied-bf16", "shards-biases"])  # fmt: skip
def test_the_same_bits_as_direct_loading(checkpoint, small_chunks, tp, pp, made):
    same(checkpoint(num_hidden_layers=3, **made), tp, pp)


def test_chunks_as_they_are(checkpoint):
    same(checkpoint(num_hidden_layers=3, **ODD), 2, 1, dtype="bf16")


def test_replicas_share_what_is_read(checkpoint, small_chunks, monkeypatch):
    path = checkpoint(num_hidden_layers=3, **ODD)
    same(path, 2, 1, replicas=2)
    shares = []
    monkeypatch.setattr(striped, "Reader", counted(shares))
    load_on(path, 2, 1, replicas=2, way="striped")
    total = sum(t.nbytes for t in load_file(path / "model.safetensors").values())
    assert len(shares) == 4 and sum(shares) == total


def test_more_ranks_than_key_heads(checkpoint, small_chunks):
    """Several ranks have equal rows."""
    same(checkpoint(num_key_value_heads=2), 6, 1)


def test_a_header_of_odd_length(checkpoint, small_chunks, tmp_path):
    """Its tensors lie at odd addresses; files of today are padded to eight bytes."""
    whole = (checkpoint(**ODD) / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + length].rstrip()
    header += b" " * (len(header) % 2 == 0)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + length :])
    (tmp_path / "config.json").write_bytes((checkpoint(**ODD) / "config.json").read_bytes())
    assert all(entry.start % 2 for entry in read_index(tmp_path).headers["model.safetensors"].values())
    same(tmp_path, 2, 2)


@pytest.mark.parametrize("tp, pp", [(2, 1), (2, 2), (3, 1)])
def test_each_byte_is_read_once_and_each_rank_reads_its_share(checkpoint, small_chunks, monkeypatch, tp, pp):
    path = checkpoint(num_hidden_layers=3, shards=3, **ODD)
    reads, real = [], os.preadv
    lock = threading.Lock()

    def spy(fd, buffers, offset):
        got = real(fd, buffers, offset)
        with lock:
            reads.append((os.readlink(f"/proc/self/fd/{fd}"), offset, got))
        return got

    monkeypatch.setattr(striped.os, "preadv", spy)
    shares = []
    monkeypatch.setattr(striped, "Reader", counted(shares))
    load_on(path, tp, pp, way="striped")
    files = {str(f): f.stat().st_size for f in path.glob("*.safetensors")}
    headers = {str(path / f): min(e.start for e in one.values()) for f, one in read_index(path).headers.items()}
    for file, size in files.items():
        at = headers[file]
        for _, offset, got in sorted(one for one in reads if one[0] == file):
            assert offset == at  # no gap and no overlap
            at += got
        assert at == size
    total = sum(files.values()) - sum(headers.values())
    assert sum(shares) == total
    assert max(shares) - min(shares) < 1000  # a few rows


def counted(shares):
    class Counted(striped.Reader):
        def __init__(self, path, chunks):
            super().__init__(path, chunks)
            shares.append(sum(chunk.size for chunk in chunks))

    return Counted


def test_tensors_that_nobody_needs_are_not_read(checkpoint, small_chunks, tmp_path, monkeypatch):
    path = checkpoint(num_hidden_layers=3, **ODD)
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    needed = sum(t.nbytes for t in tensors.values())
    save_file({**tensors, "model.layers.1.extra": torch.zeros(5000)}, tmp_path / "model.safetensors")
    shares = []
    monkeypatch.setattr(striped, "Reader", counted(shares))
    load_on(tmp_path, 2, way="striped")
    assert sum(shares) == needed
    same(tmp_path, 2, 1)


def test_progress_counts_the_jobs_bytes_on_every_rank(checkpoint, small_chunks, caplog):
    path = checkpoint(num_hidden_layers=3, **ODD)
    calls = []
    with caplog.at_level(logging.INFO, "phalanx"):
        load_on(path, 2, way="striped", progress=lambda done, total: calls.append((done, total)))
    total = sum(t.nbytes for t in load_file(path / "model.safetensors").values())
    assert calls[-1] == (total, total) and calls.count((total, total)) == 2
    assert sorted(calls)[::2] == sorted(calls)[1::2] and len(calls) > 20
    (said,) = (r.message for r in caplog.records if r.message.startswith("read "))
    assert f"{total / 1e9:.2f} GB" in said
    assert "GB/s: each byte once," in said


def entry(start, *shape):
    return Entry("F32", shape, start, start + 4 * torch.Size(shape).numel())


def test_stripes_are_equal_to_a_row_and_chunks_no_longer_than_asked():
    tensors = [("a", "x", entry(80, 10, 100)), ("b", "x", entry(4080, 500)), ("c", "y", entry(10, 3, 2000))]
    stripes = striped.cut(tensors, 4, 2048)
    sizes = [sum(chunk.size for chunk in stripe) for stripe in stripes]
    assert sum(sizes) == 4000 + 2000 + 24000
    # 30000 bytes: 7500 each, but a row of c has 8000, and whoever begins it reads it.
    assert sizes == [14000, 8000, 8000, 0]
    assert stripes[0][-1] == striped.Chunk("y", 10, 8000, [striped.Extent("c", 0, 1, 0)])
    assert [chunk.size for chunk in stripes[0]] == [2000, 2048, 1952, 8000]
    assert stripes[0][1].extents == [striped.Extent("a", 5, 10, 0), striped.Extent("b", 0, 12, 2000)]


def test_many_ranks_read_smaller_chunks(checkpoint, monkeypatch):
    monkeypatch.setattr(striped, "ROUND", 8000)
    sizes = []

    def cut(tensors, stripes, most, real=striped.cut):
        sizes.append(most)
        return real(tensors, stripes, most)

    monkeypatch.setattr(striped, "cut", cut)
    load_on(checkpoint(**ODD), 2, way="striped")
    assert sizes == [4000, 4000]


@pytest.mark.parametrize("tp, pp, replicas", [(1, 1, 1), (2, 1, 1), (1, 2, 2)])
def test_what_reading_takes_is_known_before_the_first_read(checkpoint, small_chunks, monkeypatch, tp, pp, replicas):
    counted, made = [], []
    lock = threading.Lock()

    class Counted(striped.Striped):
        def __init__(self, *given):
            super().__init__(*given)
            counted.append(self.buffers)

    def empty(*shape, real=torch.empty, **options):
        tensor = real(*shape, **options)
        if tensor.dtype == torch.uint8:
            with lock:
                made.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(load_module, "Striped", Counted)
    monkeypatch.setattr(striped.torch, "empty", empty)
    load_on(checkpoint(num_hidden_layers=3, **ODD), tp, pp, replicas, way="striped")
    assert sum(made) == sum(counted) and len(counted) == tp * pp * replicas
    assert min(counted) > 3 * 2500


def test_a_host_without_memory_for_what_reading_takes(checkpoint, monkeypatch):
    """Told with numbers before anything is read or allocated, also for ranks on GPUs; what fits exactly is loaded."""
    path = checkpoint(num_hidden_layers=3, vocab_size=8192)
    weights = sum(t.nbytes for t in load_file(path / "model.safetensors").values())
    load_on(path, way="striped", room=2 * weights)  # one chunk holds all of it
    monkeypatch.setattr(load_module, "_fill", None)
    free = weights - 200_000
    for options in (
        {"room": weights + free},
        {"device": "cuda", "room": weights, "dtype": "f32", "host_room": free},
    ):
        with pytest.raises(errors.FatalError) as stopped:
            load_on(path, way="striped", **options)
        assert stopped.value.code == errors.MEMORY
        assert re.search(f"striped.*takes {weights / 1e6:.1f}.*{free / 1e6:.1f} MB", str(stopped.value))


def test_one_host_without_memory_stops_all_ranks(checkpoint):
    """The others are not left waiting for what it would send."""
    path = checkpoint(**ODD)

    def one(world):
        with pytest.raises(errors.FatalError) as stopped:
            load(path, mesh.build(world, 2, 1), way="striped", room=1 if world.rank else 1 << 40)
        return str(stopped.value), stopped.value.code

    (other, code), (refused, its) = threads.run(one, 2)
    assert code == its == errors.MEMORY
    assert "another rank" in other
    assert refused.startswith("this rank's weights take ") and "0.00 GB are free" in refused


@pytest.mark.parametrize("kind, ranks, way", [
    ("ext4", 2, "direct"), ("lustre", 2, "striped"), ("nfs4", 1, "direct"), ("fuse.juicefs", 2, "striped"),
])  # fmt: skip
def test_network_file_systems_are_read_in_stripes(checkpoint, monkeypatch, caplog, kind, ranks, way):
    monkeypatch.setattr(filesystems, "kind", lambda path: kind)
    with caplog.at_level(logging.INFO, "phalanx"):
        load_on(checkpoint(**ODD), ranks)
    assert ("each byte once" in caplog.text) == (way == "striped")


def stop(path, **options):
    with pytest.raises(errors.FatalError) as stopped:
        load_on(path, 2, way="striped", **options)
    assert stopped.value.code == errors.MODEL
    return str(stopped.value)


def test_files_that_are_wrong_before_the_first_read(checkpoint, tmp_path):
    path = checkpoint(num_hidden_layers=2, shards=2)
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    second = tmp_path / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    assert re.search(f"{second}.*truncated.*{len(whole)} bytes", stop(tmp_path))
    second.write_bytes((10**12).to_bytes(8, "little") + whole[8:])
    said = stop(tmp_path)
    assert str(second) in said and "header" in said and f" {len(whole)} bytes" in said and str(10**12) not in said
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    for change, said in (
        ({"shape": [7]}, f"bytes for {name}, F32 of shape [7]"),
        ({"shape": None}, "$.shape"),
        ({"data_offsets": [0]}, "$.data_offsets"),
    ):
        text = json.dumps(header | {name: header[name] | change}).encode()
        second.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
        message = stop(tmp_path)
        assert str(second) in message and "truncated" in message and said in message
    second.unlink()
    assert re.search(f"{tmp_path}.*names {second.name}.*missing", stop(tmp_path))


def test_files_that_fail_while_they_are_read(checkpoint, monkeypatch):
    path = checkpoint(**ODD)
    file = path / "model.safetensors"
    real = os.preadv
    begin = min(e.start for e in read_index(path).headers["model.safetensors"].values())

    def short(fd, buffers, offset):
        return real(fd, buffers, offset) if offset == begin else 0

    monkeypatch.setattr(striped.os, "preadv", short)
    message = stop(path)
    assert message.startswith(f"{file} ends at byte ") and "moment ago" in message

    def fail(fd, buffers, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(striped.os, "preadv", fail)
    assert f"{file} cannot" in stop(path) and stop(path).endswith(": Input/output error")

    def refuse(name, flags, *more, real=os.open):
        if str(name).endswith(".safetensors"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(name, flags, *more)

    monkeypatch.setattr(striped.os, "open", refuse)
    assert re.search(f"{file} cannot.*handle", stop(path))


def test_a_file_server_that_is_silent_for_a_while_is_named(checkpoint, monkeypatch, caplog):
    path = checkpoint(**ODD)
    monkeypatch.setattr(striped, "PATIENCE", 0.2)
    asked = threading.Event()

    def slow(fd, buffers, offset, real=os.preadv):
        if not asked.is_set():
            asked.set()
            time.sleep(0.7)  # longer than PATIENCE, three times
        return real(fd, buffers, offset)

    monkeypatch.setattr(striped.os, "preadv", slow)
    load_on(path, way="striped")
    said = [r.message for r in caplog.records if "no answer" in r.message]
    assert f"waiting on {socket.gethostname()}" in said[0]
    assert 2 <= len(said) <= 3


def test_partial_reads_go_on(checkpoint, small_chunks, monkeypatch):
    path = checkpoint(**ODD)
    real = os.preadv
    monkeypatch.setattr(striped.os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:700]], offset))
    same(path, 2, 1)
