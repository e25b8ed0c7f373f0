"""`phalanx pull` and `--m ID` with a hub on this machine: what is fetched, what is not fetched twice, what is said."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from phalanx.errors import FatalError
from phalanx.launcher import cli, hf_hub
from phalanx.launcher.job import mpi_env, mpirun

from ... import gguf_files
from ...checkpoints import make_checkpoint
from ...ranks import AS_ROOT
from ..jobs import Launched
from .fake_hub import COMMIT, Hub

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"x" * 1000,
    "README.md": b"a model",
    "pytorch_model.bin": b"the same once more",
    "consolidated.safetensors": b"the same once more",
    "onnx/model.safetensors": b"the same once more",
}
WANTED = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def server():
    found = Hub(dict(FILES))
    yield found
    found.close()


@pytest.fixture
def run(server, tmp_path):
    """`phalanx` with the hub and a cache of its own."""

    def call(*argv, module=("-m", "phalanx.launcher.cli"), **environ):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PHALANX_"))}
        given = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", **environ}
        command = [sys.executable, *module, *argv]
        return subprocess.run(command, env=kept | given, capture_output=True, text=True, timeout=60)

    return call


def fetched(server) -> list[str]:
    return sorted(line.rpartition("/")[2] for line in server.seen if line.startswith("GET /org/tiny/resolve"))


def test_into_the_cache(server, run, tmp_path):
    done = run("pull", "org/tiny")
    cache = tmp_path / "hf" / "hub"
    assert (done.returncode, done.stdout) == (0, f"{cache}/models--org--tiny/snapshots/{COMMIT}\n")
    began, ended = done.stderr.splitlines()
    assert "org/tiny (4 files" in began
    assert str(cache) in began
    assert "complete" in ended and ended.endswith(": phalanx serve org/tiny")
    assert sorted(os.listdir(done.stdout.strip())) == WANTED
    assert Path(done.stdout.strip(), "model.safetensors").read_bytes() == FILES["model.safetensors"]
    server.seen.clear()
    again = run("pull", "org/tiny")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert not fetched(server)
    server.seen.clear()
    found = run("-c", "from phalanx.launcher import hf_hub; print(hf_hub.model('org/tiny', waiting=True))", module=())
    assert (found.returncode, found.stdout) == (0, done.stdout), found.stderr
    assert not server.seen  # what is complete needs no network, also without the files that are not wanted


def test_into_a_directory(server, run, tmp_path):
    """A download that broke off goes on where it was."""
    server.files["model.safetensors"] = os.urandom(24 << 20)
    server.cut.add("model.safetensors")
    server.token = "t"
    done = run("pull", "org/tiny", "--to", str(tmp_path / "to"), "--revision", "main", HF_TOKEN="t")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/to\n"), done.stderr
    assert f": phalanx serve {tmp_path}/to\n" in done.stderr
    assert (tmp_path / "to" / "model.safetensors").read_bytes() == server.files["model.safetensors"]
    assert [line.rpartition(" ")[2] for line in server.seen if "Range" in line or "bytes=" in line] == [
        f"bytes={10 << 20}-"  # of what had come, whole chunks are kept
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("argv", "setting", "code", "message"),
    [
        (["other/model"], {}, 3, "no such model at {url}; a private one needs HF_TOKEN"),
        (["org/tiny"], {"token": "t"}, 2, "accept its conditions at {url}/org/tiny, and set HF_TOKEN to a"),
        (["org/tiny", "--revision", "v9"], {}, 2, "model 'org/tiny' has no revision 'v9' at {url}"),
        (["org/tiny"], {"status": 403}, 1, "model 'org/tiny': {url} answered 403 ("),
        (["org/tiny"], {"files": {"config.json": b"", "a.gguf": b""}}, 3,
         "model 'org/tiny' has no safetensors, which is needed; it has .gguf, .json"),
        (["org/tiny"], {"files": {}}, 3, "model 'org/tiny' has no config.json, which is needed; it has no files"),
    ],
)  # fmt: skip
def test_what_cannot_be_fetched(server, run, argv, setting, code, message):
    for name, value in setting.items():
        setattr(server, name, value)
    if argv == ["other/model"]:
        server.status, server.error = 404, "RepoNotFound"
    done = run("pull", *argv)
    assert done.returncode == code
    assert message.format(url=server.url) in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
def test_no_network(run, tmp_path):
    for more in ((), ("--f", "tiny.gguf"), ("--to", str(tmp_path / "to"))):
        done = run("pull", "org/tiny", *more, HF_ENDPOINT="http://127.0.0.1:1")
        assert done.returncode == 1
        assert "phalanx: model 'org/tiny': http://127.0.0.1:1" in done.stderr
        assert "network" in done.stderr and len(done.stderr.splitlines()) == 1
    for verb in ("serve", "fit"):
        done = run(verb, "--device", "cpu", "--m", "org/tiny", HF_ENDPOINT="http://127.0.0.1:1")
        assert done.returncode == 1
        assert f"{tmp_path}/hf/hub, and http://127.0.0.1:1" in done.stderr
        assert "`phalanx pull org/tiny`" in done.stderr
    assert run("fit", "--device", "cpu", "--m", "org/tiny", HF_HUB_OFFLINE="1").returncode == 3


def test_an_id_that_the_hub_would_not_have(run):
    done = run("pull", "org/ti--ny")
    assert done.returncode == 3
    assert f"directory on {mpi_env.hostname()}," in done.stderr


def test_a_cache_that_cannot_be_written(run, tmp_path):
    (tmp_path / "hf").write_text("")
    done = run("pull", "org/tiny")
    assert done.returncode == 1
    assert f"phalanx: model 'org/tiny': {tmp_path}/hf/" in done.stderr and ": Not a directory\n" in done.stderr


def test_an_interrupted_fetch_says_that_it_can_go_on(monkeypatch):
    import huggingface_hub

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", interrupt)
    with pytest.raises(FatalError) as stop:
        hf_hub.fetch("org/tiny")
    assert "org/tiny" in str(stop.value) and "interrupted" in str(stop.value) and stop.value.code == 130


def test_what_is_no_id(capsys):
    assert cli.main(["pull"]) == 2
    assert cli.main(["pull", "tiny"]) == 2
    none, wrong = capsys.readouterr().err.splitlines()
    assert "needed" in none and "ORGANISATION/NAME" in none
    assert "'tiny'" in wrong and "ORGANISATION/NAME" in wrong
    assert (
        not hf_hub.is_id("/org/name")
        and not hf_hub.is_id("./name")
        and not hf_hub.is_id("a/b/c")
        and hf_hub.is_id("a-b/c_d.e")
    )


def test_a_fetch_that_was_interrupted_is_not_taken(tmp_path):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert not hf_hub._is_complete(tmp_path)
        (tmp_path / name).write_text("{}")
    assert hf_hub._is_complete(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    (tmp_path / "model-1.safetensors").write_text("")
    assert not hf_hub._is_complete(tmp_path)
    (tmp_path / "model-2.safetensors").write_text("")
    assert hf_hub._is_complete(tmp_path)
    index.write_text("{")
    assert not hf_hub._is_complete(tmp_path)


def test_a_full_disk_is_seen_before(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_hub.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 2_000_000_000))
    (tmp_path / "part").write_bytes(b"x" * 1000)
    hf_hub._check_room("org/tiny", tmp_path, tmp_path, 2_000_001_000)
    with pytest.raises(FatalError) as stop:
        hf_hub._check_room("org/tiny", tmp_path / "new", tmp_path / "new", 3_500_000_000)
    assert re.search(f"3.5 GB.*{tmp_path}/new.*2.0 GB", str(stop.value)) and stop.value.code == 1


def test_nothing_is_fetched_while_ranks_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_hub, "cached", lambda id: "/cache/x" if id == "org/here" else "")
    monkeypatch.setattr(hf_hub, "_cache", lambda: tmp_path)
    monkeypatch.setattr(hf_hub, "fetch", lambda id: f"/fetched/{id}")
    assert hf_hub.model("org/here", waiting=True) == hf_hub.model("org/here") == "/cache/x"
    assert hf_hub.model("org/tiny") == "/fetched/org/tiny"
    with pytest.raises(FatalError) as stop:
        hf_hub.model("org/tiny", waiting=True)
    assert re.search(f"complete.*{tmp_path}.*HF_HOME", str(stop.value).partition(", and ")[2]) and stop.value.code == 3


SHARDS = [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def test_one_gguf_file_with_its_shards(server, run, tmp_path):
    """Nothing else of the repository, and no shard twice."""
    server.files |= {name: b"GGUF of " + name.encode() for name in (*SHARDS, "other.gguf")}
    done = run("pull", "org/tiny", "--f", SHARDS[0])
    place = tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert (done.returncode, done.stdout) == (0, f"{place / SHARDS[0]}\n"), done.stderr
    assert sorted(one.name for one in place.iterdir()) == SHARDS == fetched(server)
    assert f" --model org/tiny --f {SHARDS[0]}\n" in done.stderr
    assert run("pull", "org/tiny", "--f", SHARDS[0], "--to", "x").returncode == 2
    done = run("pull", "org/tiny", "--f", "none.gguf")
    assert done.returncode == 3 and "model 'org/tiny'" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(120)
def test_serve_a_gguf_file_by_id(server, tmp_path):
    """--m ID --f FILE: fetched once, then served without a look at the network."""
    path = make_checkpoint(tmp_path / "ckpt")
    (tmp_path / "gguf").mkdir()
    gguf_files.write(path, tmp_path / "gguf" / "tiny.gguf", "F16", tokenizer=gguf_files.tokenizer(path), shards=3)
    server.files = {one.name: one.read_bytes() for one in (tmp_path / "gguf").iterdir()}
    environ = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", **AS_ROOT}
    command = [sys.executable, "-m", "phalanx.launcher.cli", "serve", "--m", "org/tiny", "--f", SHARDS[0], "--p", "0"]
    command += ["--idle-exit", "0.01", "--device", "cpu", "--mem", "64", "--dtype", "f32"]
    for expected in (SHARDS, []):
        server.seen.clear()
        with Launched(command, tmp_path, **environ) as job:
            assert job.process.wait(60) == 0, job.output
            assert fetched(server) == expected
    assert not server.seen


@pytest.mark.long
@pytest.mark.timeout(120)
def test_serve_by_id(server, tmp_path):
    """Fetched once, before the ranks are started, and then served under its id without a look at the network."""
    checkpoint = make_checkpoint(tmp_path / "ckpt")
    server.files = {path.name: path.read_bytes() for path in Path(checkpoint).iterdir()}
    environ = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", **AS_ROOT}
    command = [sys.executable, "-m", "phalanx.launcher.cli", "serve", "--m", "org/tiny", "--idle-exit", "0.01"]
    command += ["--p", "0", "--device", "cpu", "--mem", "64", "--dtype", "f32"]
    under_mpirun = mpirun.command(mpirun.find(os.environ), 2, command)
    with Launched(under_mpirun, tmp_path, **environ) as job:
        assert job.process.wait(30) == 3  # the other ranks would wait for it
        assert "complete" in job.output and f"{tmp_path}/hf/hub" in job.output and "HF_HOME" in job.output
        assert not fetched(server)
    with Launched(command, tmp_path, **environ) as job:
        assert job.process.wait(60) == 0, job.output
        assert "(model org/tiny)" in job.output
        assert fetched(server) and len(fetched(server)) == len(set(fetched(server)))
    server.seen.clear()
    with Launched([*under_mpirun, "--served-model-name", "mine"], tmp_path, **environ) as job:
        assert job.process.wait(60) == 0, job.output
        assert "(model mine)" in job.output
    assert not server.seen
