"""Loading on live ranks: nodes that differ and files that are broken end the job with one message of one rank."""

import json
import re
import shutil
import socket
import threading
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
    """Ranks that cannot load report one thing."""
    with pytest.raises(AssertionError, match="come up") as caught:
        Engine(model, 2, **options)
    return one_line(str(caught.value))


def one_line(output: str) -> str:
    """The only other line is the supervisor's, where there is one."""
    said = [line for line in output.splitlines() if line.startswith("phalanx: ")]
    said = [line for line in said if "; loading" not in line and "the job ended" not in line]
    assert len(said) == 1 and "Traceback" not in output, output
    return said[0].removeprefix("phalanx: ")


def ended(model, *arguments) -> str:
    """A whole job that cannot load ends with code 3, in time, and nothing left of it."""
    with Server(str(model), "--np", "2", "--device", "cpu", "--timeout", "20", *arguments, wait=False) as server:
        server.wait_ranks(2)
        assert server.exit_code(40) == errors.MODEL, server.output
        assert not server.left()
    return one_line(server.output)


def differing(checkpoint, monkeypatch, what, **options) -> str:
    monkeypatch.setenv("DIFFER", what)
    return refused(checkpoint, **options, program=quick(Path(__file__).parent / "differing.py"))


@pytest.mark.long
def test_another_version_on_some_node(checkpoint, monkeypatch):
    from phalanx import __version__

    said = differing(checkpoint, monkeypatch, "version:0.0.1")
    assert re.search(f"rank 1.*0.0.1.*rank 0.*{__version__}", said)


def test_other_weights_on_some_node(checkpoint, copy, monkeypatch):
    size = (copy / SECOND).stat().st_size
    (copy / SECOND).write_bytes(b"x" * 123)
    said = differing(checkpoint, monkeypatch, f"model:{copy}")
    assert re.search(f"rank 1.*{copy}/{SECOND}.*123 bytes.*{size} bytes", said)


@pytest.mark.long
def test_no_model_on_some_node(checkpoint, monkeypatch):
    assert re.search("rank 1.*/nowhere/model.*rank 0", differing(checkpoint, monkeypatch, "model:/nowhere/model"))


def test_what_differs(checkpoint, copy):
    first = take(checkpoint, weights=True)
    assert first == take(copy, weights=True) and len(first.files) == 2 and not first.problem
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    assert re.search(f"{copy}/config.json.*differs.*rank 0", difference(copy, take(copy, True), first, "rank 0 on a"))
    (copy / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (copy / SECOND).unlink()
    missing = take(copy, True)
    size = first.files[SECOND]
    assert re.search(f"{copy}/{SECOND}.*missing.*{size} bytes", difference(copy, missing, first, "rank 0 on a"))
    assert re.search(f"{copy}/{SECOND}.*{size} bytes.*missing", difference(copy, first, missing, "rank 0 on a"))
    assert take(copy, weights=False) == Fingerprint(first.config)
    (copy / "model.safetensors.index.json").unlink()
    assert re.search(f"{copy}.*model-00001-of-00002.safetensors", take(copy, True).problem)
    (copy / "config.json").unlink()
    assert f"{copy}/config.json cannot" in take(copy, True).problem


def test_the_first_that_differs_speaks_and_counts_the_others(checkpoint, monkeypatch):
    """Threads stand for ranks on other nodes."""
    sees = threading.local()
    monkeypatch.setattr(fingerprint, "take", lambda path, weights: sees.it)

    def one(world):
        sees.it = Fingerprint("a" if world.rank < 2 else "b")
        fingerprint.check(world, ["n0", "n0", "n1", "n1", "n1"], checkpoint, True)

    with pytest.raises(errors.FatalError) as stopped:
        threads.run(one, 5)
    assert re.search(f"{checkpoint}/config.json.*differs.*2 more", str(stopped.value))
    assert stopped.value.code == errors.MODEL


@pytest.mark.long
def test_a_model_that_no_node_has():
    assert re.search(f"rank 0 on {HOST}.*/nowhere/model", refused("/nowhere/model"))


@pytest.mark.long
@pytest.mark.parametrize("way", ["direct", "striped"])
def test_a_truncated_file(copy, way):
    whole = (copy / SECOND).read_bytes()
    (copy / SECOND).write_bytes(whole[:-100])
    said = ended(copy, "--load", way)
    rank, _, rest = said.partition(f" on {HOST}: ")
    assert rank in (("rank 0",) if way == "striped" else ("rank 0", "rank 1"))
    assert f"{copy}/{SECOND}" in rest and "truncated" in rest and f"{len(whole)} bytes" in rest


@pytest.mark.long
def test_a_disk_that_fails_under_one_rank(checkpoint, monkeypatch):
    """Stripes are dealt from the last rank on."""
    said = differing(checkpoint, monkeypatch, "disk", load="striped")
    assert f"{HOST}: {checkpoint}/model-00001-of-00002.safetensors cannot" in said
    assert said.endswith(": Input/output error")


@pytest.mark.long
def test_a_rank_without_memory_for_its_weights(checkpoint, monkeypatch):
    said = differing(checkpoint, monkeypatch, "memory:1000")
    where = "on its GPU" if device(2) == "cuda" else "for it"
    assert f"{where} 0.00 GB" in said


@pytest.mark.long
def test_a_missing_shard(copy):
    (copy / SECOND).unlink()
    assert re.search(f"{copy}.*{SECOND}.*missing", refused(copy, load="striped"))


@pytest.mark.long
def test_striped_ranks_answer_as_direct_ones(checkpoint):
    requests = {"a": ([5, 6, 7], greedy(20)), "b": ([100] * 30, greedy(20))}
    tokens = []
    for way in ("direct", "striped"):
        with Engine(checkpoint, 2, load=way) as engine:
            tokens.append({name: out.tokens for name, out in engine.generate(requests).items()})
            assert ("2 ranks" in engine.log()) == (way == "striped")
    assert tokens[0] == tokens[1]


@pytest.mark.long
def test_a_staged_model_is_loaded_from_the_node(checkpoint, tmp_path):
    request = {"a": ([5, 6, 7], greedy(20))}
    with Engine(checkpoint, 2, stage=str(tmp_path / "scratch")) as engine:
        tokens = engine.generate(request)["a"].tokens
        (copied,) = (tmp_path / "scratch").iterdir()
        assert engine.log().count(" staged ") == 1 and f" GB in {copied} in " in engine.log()
    with Engine(checkpoint, stage=str(tmp_path / "scratch")) as engine:
        assert re.search(f"loading.*{copied}", engine.log()) and len(tokens) == 20
        assert " staged " not in engine.log()


@pytest.mark.long
def test_a_place_that_cannot_be_staged_to(checkpoint):
    assert f"{HOST}: --stage /proc/scratch: /proc/scratch:" in refused(checkpoint, stage="/proc/scratch")
