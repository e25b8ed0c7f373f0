"""Loading on live ranks: nodes that differ and files that are broken end the job with one message of one rank."""

import json
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
from phalanx import errors
from phalanx.comm import threads
from phalanx.rank.model import fingerprint
from phalanx.rank.model.fingerprint import Fingerprint, difference, take

from ..checkpoints import make_checkpoint
from ..engine import Engine, device, greedy
from ..ranks import quick
from ..server import Server

HOST = socket.gethostname()
SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("loading") / "ckpt", shards=2)


@pytest.fixture
def copy(checkpoint, tmp_path):
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def refused(model, **options) -> str:
    """What ranks that cannot load say: one thing."""
    with pytest.raises(AssertionError, match="the ranks did not come up") as caught:
        Engine(model, 2, **options)
    return one_line(str(caught.value))


def one_line(output: str) -> str:
    """Beside it only the supervisor's word, where there is one."""
    said = [line for line in output.splitlines() if line.startswith("phalanx: ")]
    said = [line for line in said if "; loading" not in line and "the job ended" not in line]
    assert len(said) == 1 and "Traceback" not in output, output
    return said[0].removeprefix("phalanx: ")


def ended(model, *arguments) -> str:
    """The same of a whole job, with code 3, in time, and nothing left of it."""
    start = time.monotonic()
    with Server(str(model), "--np", "2", "--device", "cpu", "--timeout", "20", *arguments, wait=False) as server:
        server.wait_ranks(2)
        assert server.exit_code(40) == errors.MODEL, server.output
        assert not server.left()
    assert time.monotonic() - start < 20 + 20  # the start of the ranks comes before
    return one_line(server.output)


def differing(checkpoint, monkeypatch, what, **options) -> str:
    monkeypatch.setenv("DIFFER", what)
    return refused(checkpoint, **options, program=quick(Path(__file__).parent / "differing.py"))


@pytest.mark.long
def test_another_version_on_some_node(checkpoint, monkeypatch):
    from phalanx import __version__

    assert differing(checkpoint, monkeypatch, "version:0.0.1") == (
        f"rank 1 on {HOST} has Phalanx 0.0.1, rank 0 on {HOST} has {__version__}; all nodes need the same"
    )


def test_other_weights_on_some_node(checkpoint, copy, monkeypatch):
    size = (copy / SECOND).stat().st_size
    (copy / SECOND).write_bytes(b"x" * 123)
    assert differing(checkpoint, monkeypatch, f"model:{copy}") == (
        f"rank 1 on {HOST}: {copy}/{SECOND} has 123 bytes here; for rank 0 on {HOST} it has {size} bytes; "
        "all nodes have to see the same model"
    )


@pytest.mark.long
def test_no_model_on_some_node(checkpoint, monkeypatch):
    assert differing(checkpoint, monkeypatch, "model:/nowhere/model") == (
        f"rank 1 on {HOST}: there is no model directory /nowhere/model, but rank 0 on {HOST} sees it; "
        "all nodes have to see the same model"
    )


def test_what_differs(checkpoint, copy):
    first = take(checkpoint, weights=True)
    assert first == take(copy, weights=True) and len(first.files) == 2 and not first.problem
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    assert difference(copy, take(copy, True), first, "rank 0 on a") == (
        f"{copy}/config.json differs from what rank 0 on a sees"
    )
    (copy / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (copy / SECOND).unlink()
    missing = take(copy, True)
    size = first.files[SECOND]
    assert difference(copy, missing, first, "rank 0 on a") == (
        f"{copy}/{SECOND} is missing here; for rank 0 on a it has {size} bytes"
    )
    assert difference(copy, first, missing, "rank 0 on a") == (
        f"{copy}/{SECOND} has {size} bytes here; for rank 0 on a it is missing"
    )
    assert take(copy, weights=False) == Fingerprint(first.config)
    (copy / "model.safetensors.index.json").unlink()
    assert take(copy, True).problem == (
        f"{copy} has neither model.safetensors nor model.safetensors.index.json; "
        "model-00001-of-00002.safetensors is not read without an index of the tensors in each file"
    )
    (copy / "config.json").unlink()
    assert take(copy, True).problem == f"{copy}/config.json cannot be read: No such file or directory"


def test_the_first_that_differs_speaks_and_counts_the_others(checkpoint, monkeypatch):
    """Threads stand for ranks on other nodes."""
    sees = threading.local()
    monkeypatch.setattr(fingerprint, "take", lambda path, weights: sees.it)

    def one(world):
        sees.it = Fingerprint("a" if world.rank < 2 else "b")
        fingerprint.check(world, ["n0", "n0", "n1", "n1", "n1"], checkpoint, True)

    with pytest.raises(errors.FatalError) as stopped:
        threads.run(one, 5)
    assert str(stopped.value) == (
        f"{checkpoint}/config.json differs from what rank 0 on n0 sees (2 more ranks differ); "
        "all nodes have to see the same model"
    )
    assert stopped.value.code == errors.MODEL


@pytest.mark.long
def test_a_model_that_no_node_has():
    assert refused("/nowhere/model") == f"rank 0 on {HOST}: there is no model directory /nowhere/model"


@pytest.mark.long
@pytest.mark.parametrize("way", ["direct", "striped"])
def test_a_truncated_file(copy, way):
    whole = (copy / SECOND).read_bytes()
    (copy / SECOND).write_bytes(whole[:-100])
    said = ended(copy, "--load", way)
    rank, _, rest = said.partition(f" on {HOST}: ")
    assert rank in (("rank 0",) if way == "striped" else ("rank 0", "rank 1"))
    assert rest == (
        f"{copy}/{SECOND} is damaged or truncated: its header tells of {len(whole)} bytes, "
        f"the file has {len(whole) - 100}"
    )


@pytest.mark.long
def test_a_disk_that_fails_under_one_rank(checkpoint, monkeypatch):
    """Stripes are dealt from the last rank on."""
    said = differing(checkpoint, monkeypatch, "disk", load="striped")
    assert said.startswith(f"rank 1 on {HOST}: {checkpoint}/model-00001-of-00002.safetensors cannot be read at byte ")
    assert said.endswith(": Input/output error")


@pytest.mark.long
def test_a_rank_without_memory_for_its_weights(checkpoint, monkeypatch):
    said = differing(checkpoint, monkeypatch, "memory:1000")
    where = "on its GPU" if device(2) == "cuda" else "for it"
    assert said.startswith(f"rank 1 on {HOST}: this rank's weights take 0.00 GB, but {where} 0.00 GB are free: ")


@pytest.mark.long
def test_a_missing_shard(copy):
    (copy / SECOND).unlink()
    assert refused(copy, load="striped") == (
        f"rank 0 on {HOST}: {copy}: model.safetensors.index.json names {SECOND}, which is missing"
    )


@pytest.mark.long
def test_striped_ranks_answer_as_direct_ones(checkpoint):
    requests = {"a": ([5, 6, 7], greedy(20)), "b": ([100] * 30, greedy(20))}
    tokens = []
    for way in ("direct", "striped"):
        with Engine(checkpoint, 2, load=way) as engine:
            tokens.append({name: out.tokens for name, out in engine.generate(requests).items()})
            assert ("each byte once, by one of 2 ranks" in engine.log()) == (way == "striped")
    assert tokens[0] == tokens[1]


@pytest.mark.long
def test_a_staged_model_is_loaded_from_the_node(checkpoint, tmp_path):
    request = {"a": ([5, 6, 7], greedy(20))}
    with Engine(checkpoint, 2, stage=str(tmp_path / "scratch")) as engine:
        tokens = engine.generate(request)["a"].tokens
        (copied,) = (tmp_path / "scratch").iterdir()
        assert engine.log().count(" staged ") == 1 and f" GB in {copied} in " in engine.log()
    with Engine(checkpoint, stage=str(tmp_path / "scratch")) as engine:
        assert f"loading the copy in {copied}" in engine.log() and len(tokens) == 20
        assert " staged " not in engine.log()


@pytest.mark.long
def test_a_place_that_cannot_be_staged_to(checkpoint):
    assert refused(checkpoint, stage="/proc/scratch").endswith(
        f" on {HOST}: --stage /proc/scratch: /proc/scratch: No such file or directory"
    )
