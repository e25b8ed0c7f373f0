"""Flags of other servers: how they are written, what they take, and that the table contradicts nothing."""

import pytest
from phalanx.launcher.options.compat_flags import COMPAT_FLAGS, DIFFERENCES, OTHER_NAMES, find
from phalanx.launcher.options.option_sources import UsageError, from_keywords, read
from phalanx.rank.options import Options, specs

FLAGS = {flag for spec in specs().values() for flag in (*spec.flag.flags, *spec.flag.off, *spec.flag.short)}


def given(*argv):
    return read(Options, argv, {})


def refusal(*argv):
    with pytest.raises(UsageError) as error:
        given("DIR", *argv)
    assert error.value.everywhere and "\n" not in str(error.value)
    return str(error.value)


def test_other_names_are_those_of_options():
    assert set(OTHER_NAMES.values()) <= FLAGS and FLAGS | OTHER_NAMES.keys() >= DIFFERENCES.keys()


def test_an_answer_is_short_and_names_what_there_is():
    for name, entry in COMPAT_FLAGS.items():
        assert len(entry.text) < 110 and entry.takes in ("", "X", "[X]", "N .."), name
        words = [word.strip(":;,.()`") for word in entry.text.split()]
        assert not {word for word in words if word.startswith("--")} - FLAGS - {"--revision", "--to", "--sbatch"}, name


@pytest.mark.parametrize(
    ("line", "changed", "notes"),
    [
        ("-tp 2 -pp=2 -dp 3 -q fp8", {"tp": 2, "pp": 2, "dp": 3, "quantization": "fp8"}, []),
        ("--generation-config vllm", {"generation_config": False}, []),
        ("--load-format safetensors", {}, []),
        ("--tool-call-parser qwen25", {"tool_call_parser": "hermes"}, []),
        ("--mem-fraction-static 0.5", {"kv_fraction": 0.5}, ["--mem-fraction-static is read as --kv-fraction"]),
        ("-O3", {}, ["-O3 has"]),
        ("-O 3", {}, ["-O 3 has"]),
        ("-O.mode=3", {}, ["-O.mode 3 has"]),
        ("--compilation_config.level 3", {}, ["--compilation_config.level 3 has"]),
        ("--cuda-graph-sizes 1 2 4", {}, ["--cuda-graph-sizes has"]),
        ("--trust_remote_code", {}, ["--trust_remote_code has"]),
        ("-fa on -ngl 99 --jinja", {}, ["-fa on has", "-ngl 99 has", "--jinja has"]),
        ("--no-enable-chunked-prefill", {}, ["--no-enable-chunked-prefill has"]),
        ("--enable-chunked-prefill False", {}, ["--enable-chunked-prefill False has"]),
        ("--no-enable-lora", {}, ["--no-enable-lora has"]),
        ("--nnodes 1", {}, ["--nnodes 1 has"]),
        ("--mm-encoder-only D", {}, ["--mm-encoder-only D has"]),
    ],
)
def test_what_is_understood_or_passed_over(line, changed, notes):
    for argv in (["DIR", *line.split()], [*line.split(), "DIR"]):
        chosen = given(*argv)
        assert chosen.options == Options(model="DIR", **changed)
        assert len(chosen.notes) == len(notes)
        assert all(said.startswith(begin) for said, begin in zip(chosen.notes, notes, strict=True))


@pytest.mark.parametrize(
    ("line", "flag", "advice"),
    [
        ("-c 4096", "-c", "--max-model-len"),
        ("--enable-lora", "--enable-lora", "not supported"),
        ("--nnodes 2", "--nnodes", "--sbatch"),
        ("--hf_overrides={}", "--hf_overrides", "config.json"),
        ("--device CUDA0", "--device", "--d 0"),
        ("--generation-config D", "unexpected argument 'D'", "commas"),
    ],
)
def test_what_is_refused(line, flag, advice):
    message = refusal(*line.split())
    assert message.startswith(flag) and advice in message


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--ctx-sizes", "did you mean --ctx-size?"),  # which has an answer of its own then
        ("--max-model-length", "did you mean --max-model-len?"),
        ("--gpu-memory-utilisation", "did you mean --gpu-memory-utilization?"),
        ("--foo-size", "--help lists the options"),
        ("-x", "--help lists the options"),
    ],
)
def test_a_guess_is_near(flag, said):
    assert refusal(flag, "1") == f"unknown option {flag}; {said}"


def test_families_leave_options_and_other_entries_alone():
    assert given("--data-parallel-size", "2").options.dp == 2
    assert find("--data-parallel-backend") == COMPAT_FLAGS["--data-parallel-backend"]
    assert find("--data-parallel-rank") == COMPAT_FLAGS["--data-parallel-*"]
    assert find("--no-tokenizer") is None and find("--nothing") is None


def test_in_files_and_as_keywords(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("tp-size: 2\ncontext-length: 100\ngeneration_config: vllm\n")
    expected = Options(tp=2, max_model_len=100, generation_config=False)
    assert given("--config", str(file)).options == expected
    assert (
        from_keywords(Options, {"tp_size": 2, "context_length": 100, "generation_config": "vllm"}, {}, "LLM")
        == expected
    )
    file.write_text("ctx-size: 100\n")
    with pytest.raises(UsageError, match="ctx-size.*--max-model-len"):
        given("--config", str(file))
    with pytest.raises(UsageError, match="enforce_eager.*graphs"):
        from_keywords(Options, {"enforce_eager": True}, {}, "LLM")
