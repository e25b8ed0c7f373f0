"""Chosen options become a plan that runs, or one line that says why not."""

import re

import pytest
from phalanx.errors import FatalError
from phalanx.launcher.job import mpi_env
from phalanx.launcher.job.mpi_env import RankPlacement
from phalanx.launcher.options import resolve
from phalanx.rank.options import Options


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(mpi_env, "gpus", lambda: 0)


def resolved(place=None, **fields):
    return resolve.resolve(Options(**fields), place)


def refusal(place=None, **fields):
    with pytest.raises(FatalError) as stop:
        resolved(place, **fields)
    return str(stop.value), stop.value.code


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (1, 1, 1, 1)),
        ({"ranks": 3}, (3, 3, 1, 1)),
        ({"devices": (0, 1)}, (2, 2, 1, 1)),
        ({"tp": 2}, (2, 2, 1, 1)),
        ({"pp": 2}, (2, 1, 2, 1)),
        ({"dp": 2}, (2, 1, 1, 2)),
        ({"tp": 2, "pp": 3}, (6, 2, 3, 1)),
        ({"tp": 2, "dp": 3}, (6, 2, 1, 3)),
        ({"devices": (0, 1, 2, 3), "ranks": 4, "dp": 2}, (4, 2, 1, 2)),
        ({"ranks": 6, "pp": 3}, (6, 2, 3, 1)),
        ({"ranks": 6, "tp": 3}, (6, 3, 2, 1)),
    ],
)
def test_ranks_and_how_they_divide(fields, expected, model):
    options = resolved(model=model, **fields)
    assert (options.ranks, options.tp, options.pp, options.dp) == expected


def test_alone_in_a_job():
    shell, job = RankPlacement(0, 1, 0, 1, "srun"), RankPlacement(0, 2, 0, 2, "srun")
    for fields in ({"ranks": 2}, {"tp": 2}, {"restarts": 1}, {"pp": 2}, {"dp": 2}):
        assert resolve.joined(Options(**fields), shell) is None
        assert resolve.joined(Options(**fields), job) is job
    for fields in ({}, {"ranks": 1}, {"devices": (0, 1)}):
        assert resolve.joined(Options(**fields), shell) is shell
    assert resolve.joined(Options(ranks=2), None) is None


def test_under_mpi_the_job_has_the_ranks_that_were_started(model):
    assert resolved(RankPlacement(1, 4, 1, 4, "mpirun"), model=model, pp=2).tp == 2
    assert resolved(RankPlacement(1, 4, 1, 4, "mpirun"), model=model, ranks=4).ranks == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks": 4, "tp": 3}, "--tp 3 does not divide the 4 ranks"),
        ({"ranks": 4, "pp": 3}, "--pp 3 does not divide the 4 ranks"),
        ({"ranks": 6, "tp": 2, "pp": 2}, "--tp 2 times --pp 2 is 4, but there are 6 ranks"),
        (
            {"expert_deferral": True, "expert_placement": "stream", "expert_memory": 9},
            "--expert-deferral is of experts that the CPU computes: --expert-placement stream leaves it none",
        ),
        (
            {"kvcache_mem_cpu": 1, "prefix_cache": False},
            "--kvcache-mem-cpu keeps blocks of the prefix cache: leave --disable-prefix-cache out",
        ),
        ({"mem": 1, "kv_fraction": 0.5}, "--mem and --kv-fraction both size the KV cache: give one of them"),
        ({"devices": (0, 1), "ranks": 4}, "--d 0,1 lists 2 devices for 4 ranks on this node"),
        ({"api_key": "a", "api_key_file": "b"}, "--api-key and --api-key-file are both given: give one of them"),
        (
            {"allowed_origins": ("localhost:3000",)},
            "--allowed-origins 'localhost:3000': an origin is written http://HOST:PORT; * lets every page in",
        ),
        (
            {"allowed_hosts": ("a:80",)},
            "--allowed-hosts 'a:80': a name without port is needed, or *.DOMAIN; * is any",
        ),
        ({"api_key": "a b"}, "--api-key: a key has no spaces; --api-key-file FILE takes several, a line each"),
        ({"api_key_file": "/nowhere"}, "--api-key-file /nowhere: No such file or directory"),
    ],
)
def test_contradictions(fields, message, model):
    assert refusal(model=model, **fields) == (message, 2)


def test_contradictions_with_who_started_us(model):
    place = RankPlacement(0, 4, 0, 4, "mpirun")
    message, code = refusal(place, ranks=2)
    assert code == 2 and re.search("--np 2.*started 4 ranks", message)
    message, code = refusal(place, restarts=1)
    assert "--restarts works" in message
    assert code == 2
    assert re.search("--multithread.*mpirun.*started 4", refusal(place, multithread=True)[0])


def test_devices_of_ranks_that_see_one_gpu_each(model, monkeypatch):
    """`--d 0` is what each of them sees. Ranks that phalanx starts see all the same."""
    monkeypatch.setattr(mpi_env, "gpus", lambda: 1)
    assert resolved(RankPlacement(0, 4, 0, 4, "srun"), model=model, devices=(0,)).devices == (0,)
    refused = "--d 0 lists 1 devices for 4 ranks on this node"
    assert refusal(model=model, devices=(0,), ranks=4)[0] == refused
    monkeypatch.setattr(mpi_env, "gpus", lambda: 4)
    assert refusal(RankPlacement(0, 4, 0, 4, "srun"), model=model, devices=(0,))[0] == refused


def test_cuda_without_a_gpu(model):
    message, code = refusal(model=model, device="cuda")
    assert "--device cuda:" in message
    assert "--device cpu computes without" in message
    assert code == 2


def test_cuda_and_threads(model, monkeypatch):
    monkeypatch.setattr(mpi_env, "gpus", lambda: 2)
    assert refusal(model=model, device="cuda", multithread=True)[0].startswith("--multithread is for CPUs")


def test_api_key_from_a_file(model, tmp_path):
    file = tmp_path / "key"
    file.write_text("secret\n")
    assert resolved(model=model, api_key_file=str(file)).api_key == "secret"
    file.write_text("# Ann\nfirst\n\n  # Ben\r\n  second \r\n")
    assert resolved(model=model, api_key_file=str(file)).api_key == "first\nsecond"
    file.write_text("secret\n", encoding="utf-8-sig")  # as editors of Windows write it
    assert resolved(model=model, api_key_file=str(file)).api_key == "secret"
    file.write_text("ann first\nsecond\n")
    assert resolved(model=model, api_key_file=str(file)).api_key == "ann first\nsecond"
    none, binary = "no line of it is a key", "it is no text"
    long = "a line is KEY or NAME KEY, without spaces"
    cases = [(b"ann smith first", long), (b"", none), (b"\n# first\n\n", none), (b"\xef\xbb\xbf", none),
             (b"\xff\xfe", binary)]  # fmt: skip
    for content, why in cases:
        file.write_bytes(content)
        message, code = refusal(model=model, api_key_file=str(file))
        assert message == f"--api-key-file {file}: {why}" and code == 2


def test_a_template_that_is_not_there(model, tmp_path):
    (tmp_path / "latin").write_bytes(b"\xff")
    for place, why in (
        ("none", "No such file or directory"),
        (".", "Is a directory"),
        ("latin", "it is no text in UTF-8"),
    ):
        path = str(tmp_path / place)
        assert refusal(model=model, chat_template=path) == (f"--chat-template {path}: {why}", 2)


def test_model_directories(model, tmp_path, monkeypatch):
    assert resolved(model=model).model == model
    monkeypatch.chdir(tmp_path.parent)
    assert resolved(model=tmp_path.name).model == model
    assert "model 'some/model.gguf':" in refusal(model="some/model.gguf")[0]
    assert "model '/nowhere':" in refusal(model="/nowhere")[0]
    monkeypatch.setattr("phalanx.launcher.hf_hub.model", lambda id, waiting: f"/cache/{id}/0123abcd")
    by_id = resolved(model="meta-llama/Llama-3.1-8B")
    assert (by_id.model, by_id.served_model_name) == (
        "/cache/meta-llama/Llama-3.1-8B/0123abcd", "meta-llama/Llama-3.1-8B",
    )  # fmt: skip
    assert resolved(model="a/b", served_model_name="mine").served_model_name == "mine"
    assert resolved(model=model).served_model_name == ""
    assert re.search("is a file.*GGUF", refusal(model=f"{model}/config.json")[0])
    (tmp_path / "config.json").unlink()
    message, code = refusal(model=model)
    assert code == 3 and repr(model) in message and "no config.json" in message


def test_gguf_files(model, tmp_path, monkeypatch):
    file = tmp_path / "tiny.gguf"
    assert f"model '{file}':" in refusal(model=str(file))[0]
    file.touch()
    for options in (dict(model=str(file)), dict(weight_file=str(file)), dict(model=model, weight_file=file.name)):
        found = resolved(**options)
        assert (found.model, found.served_model_name, found.weight_file) == (str(file), "tiny", "")
    assert "--f x.bin:" in refusal(model=model, weight_file="x.bin")[0]
    words = f"--f other.gguf: there is no file {tmp_path / 'other.gguf'} on "
    assert refusal(model=model, weight_file="other.gguf")[0].startswith(words)
    (tmp_path / "config.json").unlink()
    words = (
        f"model {model!r}: the directory has no config.json; choose one of its GGUF files with --f, such as --f tiny"
    )
    assert refusal(model=model)[0].startswith(words)
    for number in (1, 2):
        (tmp_path / f"big-0000{number}-of-00003.gguf").touch()
    assert f"file {tmp_path / 'big-00003-of-00003.gguf'}," in resolve_words(tmp_path / "big-00001-of-00003.gguf")
    words = resolve_words(tmp_path / "big-00002-of-00003.gguf")
    assert "shard 2" in words
    monkeypatch.setattr("phalanx.launcher.hf_hub.gguf", lambda id, file, waiting: f"/cache/{id}/0123abcd/{file}")
    found = resolved(model="a/b", weight_file="b-Q8_0.gguf")
    assert (found.model, found.served_model_name) == ("/cache/a/b/0123abcd/b-Q8_0.gguf", "b-Q8_0")


def resolve_words(file):
    message, code = refusal(model=str(file))
    assert code == 3
    return message


def test_the_built_in_model():
    assert resolved().model == resolved(load_format="dummy").model == str(resolve.DEMO)
