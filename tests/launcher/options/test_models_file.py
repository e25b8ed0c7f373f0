"""models.yaml: candle-vLLM's keys, ours, the examples in the tree, and what is wrong in words."""

import os
from pathlib import Path

import msgspec
import phalanx
import pytest
import yaml
from phalanx.errors import FatalError
from phalanx.launcher import cli, hf_hub
from phalanx.launcher.options import models_file
from phalanx.launcher.options.option_sources import specs
from phalanx.rank.options import Options

ROOT = Path(phalanx.__file__).resolve().parent


@pytest.fixture
def directory(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    for name in ("m.gguf", "t.gguf"):
        (tmp_path / name).touch()
    return tmp_path


def read(directory, text, **options):
    path = directory / "models.yaml"
    path.write_text(text)
    return models_file.read(Options(models_config=str(path), **options))


CANDLE = """
default_model: b
idle_unload_secs: 600
parking_lot: {limits: {max_units: 4}}
models:
  - name: a
    local_path: a
    params:
      dtype: f16
      kvcache_mem_gpu: 512
      kvcache_mem_cpu: 64
      prefill_chunk_size: 1024
      device_ids: [0]
      temperature: 0.5
      top_k: null
      prompt_cache: {enabled: false, backend: redis}
  - name: b
    local_path: b
    notes: big
    params: {prompt_cache: {enabled: true, backend: sled}}
    capabilities: {vision_mode: proxy, vision_proxy: {hf_id: x/y}}
"""


def test_keys_of_candle_vllm(directory):
    found = read(directory, CANDLE, mem=64, max_num_seqs=8)
    assert [entry.name for entry in found.entries] == ["b", "a"] and found.idle_unload == 600
    b, a = found.options
    assert (b.model, b.mem, b.max_num_seqs, b.prefix_cache) == (str(directory / "b"), 64, 8, True)
    assert a.kvcache_mem_cpu == 64
    assert (a.dtype, a.mem, a.max_num_batched_tokens, a.temperature, a.prefix_cache) == ("f16", 512, 1024, 0.5, False)
    assert found.first().served_model_name == "b"
    notes = "\n".join(found.notes)
    for word in ("parking_lot", "device_ids", "vision_mode", "backend"):
        assert f"{word} has no effect" in notes
    configs = found.configs(msgspec.structs.replace(found.first(), ranks=2, tp=2, api_key="secret"))
    assert [(one.name, one.notes) for one in configs] == [("b", "big"), ("a", "")]
    sent = msgspec.json.decode(configs[1].options, type=Options)
    assert (sent.model, sent.ranks, sent.tp, sent.api_key) == (a.model, 2, 2, "") and configs[
        1
    ].sampling.temperature == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [", "not YAML"),
        ("models: " + "[" * 5000, "nested"),
        ("models: &a [*a]", "models"),
        ("models: [{name: a, local_path: a, params: &p {dtype: *p}}]", "dtype"),
        ("{}", "missing required field `models`"),
        ("models: []", "at least one model"),
        ("models: [{name: a}]", "model 'a': either hf_id or local_path is needed"),
        ("models: [{name: a, local_path: none}]", "no such directory"),
        ("models: [{name: a, local_path: a}, {name: a, local_path: b}]", "the name 'a' is there twice"),
        ("models: [{name: 'a,b', local_path: a}]", "has a comma"),
        ("default_model: c\nmodels: [{name: a, local_path: a}]", "default_model 'c' is none of a"),
        ("models: [{name: a, local_path: a, params: {port: 1}}]", "port is the whole job's"),
        ("models: [{name: a, local_path: a, params: {tp: 2}}]", "tp is the whole job's"),
        ("models: [{name: a, local_path: a, params: {dtyp: f32}}]", "unknown option 'dtyp'; did you mean dtype"),
        ("models: [{name: a, local_path: a, params: {dtype: f8}}]", "one of auto, bf16"),
        ("models: [{name: a, local_path: a, colour: red}]", "unknown field `colour`"),
        ("models: [{name: a, local_path: a, params: {prompt_cache: 3}}]", "prompt_cache"),
        ("models: [{name: a, local_path: a, options: {mmproj: t.gguf}}]", "is no GGUF file"),
        ("models: [{name: a, local_path: m.gguf, options: {mmproj: none.gguf}}]", "none.gguf"),
        ("models: [{name: a, local_path: m.gguf, options: {mmproj: 3}}]", "mmproj"),
        ("idle_unload_secs: -1\nmodels: [{name: a, local_path: a}]", "idle_unload_secs"),
    ],
)
def test_what_is_wrong_is_said(directory, text, message):
    with pytest.raises(FatalError, match="--models-config") as told:
        read(directory, text)
    assert message in str(told.value) and told.value.code == 2


def test_a_tower_from_the_files_place(directory):
    entry = "{name: %s, local_path: m.gguf, options: {mmproj: '%s'}}"
    found = read(directory, f"models: [{entry % ('a', 't.gguf')}, {entry % ('b', '')}]")
    assert [one.mmproj for one in found.configs(found.first())] == [str(directory / "t.gguf"), ""]


def test_each_model_has_its_parsers(directory):
    entry = "{name: %s, local_path: %s, options: {tool_call_parser: %s}}"
    found = read(directory, f"models: [{entry % ('a', 'a', 'hermes')}, {entry % ('b', 'b', 'none')}]", api_key="k")
    configs = found.configs(found.first())
    assert [config.tool_call_parser for config in configs] == ["hermes", "none"]
    assert configs[0].reasoning_parser == "auto"
    sent = msgspec.json.decode(configs[0].options, type=Options)
    assert (sent.api_key, sent.models_config) == ("", "")  # ranks get no option of the server


def test_other_ways_to_name_the_model(directory):
    text = "models: [{name: a, local_path: a}]"
    with pytest.raises(FatalError, match="leave --weight-file out"):
        read(directory, text, weight_file="x.gguf")
    with pytest.raises(FatalError, match="leave --model out"):
        read(directory, text, model="x")
    with pytest.raises(FatalError, match="leave --served-model-name out"):
        read(directory, text, served_model_name="x")
    with pytest.raises(FatalError, match="leave --file-store out"):
        read(directory, text, file_store="x")
    with pytest.raises(FatalError, match="No such file"):
        models_file.read(Options(models_config=str(directory / "none")))


def test_variables_beside_the_file(directory):
    lines = "# a comment\nexport HF_TOKEN='x y'\nPHALANX_MEM=2 # two\nPHALANX_TP=given\nnonsense\nPHALANX_SEED=\n"
    (directory / ".env").write_text(lines)
    environ = {"PHALANX_TP": "mine"}
    models_file.load_dotenv(str(directory / "models.yaml"), environ)
    assert environ == {"HF_TOKEN": "x y", "PHALANX_MEM": "2", "PHALANX_TP": "mine", "PHALANX_SEED": ""}
    assert models_file.load_dotenv(str(directory / "none" / "models.yaml"), environ) == {}


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "PYTHONPATH",
        "PATH",
        "HF_ENDPOINT",
        "PHALANX_JOB",
        "PHALANX_MCP_CONFIG",
        "CANDLE_VLLM_MCP_CONFIG",
        "PHALANX_RESUBMIT_COMMAND",
    ],
)
def test_variables_that_would_run_code_are_not_read(directory, name):
    (directory / ".env").write_text(f"{name}=/tmp/theirs\n")
    environ: dict[str, str] = {}
    assert models_file.load_dotenv(str(directory / "models.yaml"), environ) == environ == {}


def test_show_config_reads_the_variables(directory, monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith(("PHALANX_", "CANDLE_VLLM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PHALANX_DTYPE", "")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    (directory / ".env").write_text("PHALANX_MEM=77\n")
    (directory / "models.yaml").write_text("models: [{name: a, local_path: a}]")
    monkeypatch.setitem(os.environ, "CANDLE_VLLM_MODELS_CONFIG", str(directory / "models.yaml"))
    assert cli.main(["serve", "--show-config"]) == 0
    shown = capsys.readouterr().out
    assert "77" in shown
    assert str(directory / "models.yaml") in shown


def test_the_example_of_models(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_hub, "model", lambda id, waiting: f"/cache/{id}")
    text = (ROOT / "example.models.yaml").read_text(encoding="utf-8")
    large = tmp_path / yaml.safe_load(text)["models"][1]["local_path"]
    large.mkdir(parents=True)
    (large / "config.json").write_text("{}")
    found = read(tmp_path, text)
    assert [entry.name for entry in found.entries] == ["small", "large"] and found.notes == []
    assert found.options[0].model == "/cache/Qwen/Qwen3-0.6B" and found.options[1].max_model_len == 16384


def test_the_example_of_variables(tmp_path):
    variables = models_file.dotenv(ROOT / ".example.env")
    table = {name for spec in specs(Options).values() for name in (spec.env, spec.flag.variable)}
    assert set(variables) - table == {"HF_TOKEN"}


def test_variables_in_quotes_and_with_comments(tmp_path):
    file = tmp_path / ".env"
    file.write_text('\ufeffA=1\r\nexport B="x # y" # z\n#C=2\nD = \'e\'\nF=a#b # c\nno line\nG=\nH="a" b\n')
    assert models_file.dotenv(file) == {"A": "1", "B": "x # y", "D": "e", "F": "a#b", "G": "", "H": '"a" b'}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff\xfe=1\n", "no text in UTF-8"),
        (b"A=1\n=2\n", "line 2: '=2' is no NAME=VALUE"),
        (b"A=b\0c\n", "is no NAME=VALUE"),
    ],
)
def test_variables_that_cannot_be_read(tmp_path, content, why):
    (tmp_path / ".env").write_bytes(content)
    with pytest.raises(FatalError, match=why):
        models_file.load_dotenv(str(tmp_path / "models.yaml"), {})
