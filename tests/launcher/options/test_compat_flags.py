"""Flags of other servers: what means the same is understood, and the rest is answered in words that do not mislead."""

import pytest
from phalanx.launcher.options.compat_flags import COMPAT_FLAGS, DIFFERENCES, OTHER_NAMES, find
from phalanx.launcher.options.option_sources import UsageError, from_keywords, read
from phalanx.rank.options import Options, specs

TABLE = specs()
FREE = "is read as --kv-fraction: a share of the memory free after loading"


def given(*argv):
    return read(Options, argv, {})


def refusal(*argv):
    with pytest.raises(UsageError) as error:
        given("DIR", *argv)
    assert error.value.everywhere and "\n" not in str(error.value)
    return str(error.value)


def no_effect(notes, flag, text):
    """Whether the one note says so of the flag, and why."""
    return len(notes) == 1 and all(part in notes[0] for part in (flag, "no effect", text))


def test_every_flag_is_answered():
    for name, entry in COMPAT_FLAGS.items():
        flag, value = name.replace("*", "part"), "1,2" if entry.takes == "X" else "odd"
        for argv in ([flag, value] if entry.takes == "X" else [flag], [f"{flag}={value}"]):
            if entry.refused:
                assert refusal(*argv) == f"{flag}: {entry.text}"
            else:
                chosen = given(*argv, "DIR")
                said = " ".join(argv).replace("=", " ")
                assert no_effect(chosen.notes, said, entry.text)
                assert chosen.options == Options(model="DIR"), name
        for value in entry.harmless:
            chosen = given(flag, value, "DIR")
            assert no_effect(chosen.notes, f"{flag} {value}", entry.text)
            assert chosen.options == Options(model="DIR"), name


def test_an_answer_is_short_and_names_what_there_is():
    flags = [flag for spec in TABLE.values() for flag in (*spec.flag.flags, *spec.flag.off)]
    for name, entry in COMPAT_FLAGS.items():
        assert len(entry.text) < 110 and entry.takes in ("", "X", "[X]", "N .."), name
        words = [word.strip(":;,.()`") for word in entry.text.split()]
        known = *flags, "--revision", "--to", "--sbatch"
        wrong = [word for word in words if word.startswith("--") and word not in known]
        assert not wrong, name


@pytest.mark.parametrize(("other", "own"), OTHER_NAMES.items())
def test_other_names_set_the_option(other, own):
    spec = next(spec for spec in TABLE.values() if own in (*spec.flag.flags, *spec.flag.off))
    argv = [] if spec.type is bool else ["fp8" if own == "--quantization" else "1"]
    chosen, same = given(other, *argv), given(own, *argv)
    assert chosen.options == same.options
    assert chosen.origins[spec.name] == f"command line ({other})"
    assert chosen.notes == ([f"{other} {DIFFERENCES[other]}"] if other in DIFFERENCES else [])


@pytest.mark.parametrize(
    ("line", "changed", "notes"),
    [
        ("-tp 2 -pp=2 -dp 3 -q fp8", {"tp": 2, "pp": 2, "dp": 3, "quantization": "fp8"}, []),
        ("--generation-config vllm", {"generation_config": False}, []),
        ("--generation-config auto --load-format safetensors", {}, []),
        ("--tool-call-parser qwen25", {"tool_call_parser": "hermes"}, []),
        ("--reasoning-parser deepseek-r1", {"reasoning_parser": "think"}, []),
        ("--mem-fraction-static 0.5", {"kv_fraction": 0.5}, [f"--mem-fraction-static {FREE}"]),
        ("--gpu-memory-utilization 0.5", {"kv_fraction": 0.5}, [f"--gpu-memory-utilization {FREE}"]),
        ("-O3", {}, ["-O3 has no effect: graphs are used"]),
        ("-O 3", {}, ["-O 3 has no effect: graphs are used"]),
        ("-O.mode=3", {}, ["-O.mode 3 has no effect: graphs are used"]),
        ("--compilation_config.level 3", {}, ["--compilation_config.level 3 has no effect: graphs"]),
        ("--cuda-graph-sizes 1 2 4", {}, ["--cuda-graph-sizes has no effect: graphs"]),
        ("--trust_remote_code", {}, ["--trust_remote_code has no effect: no code of the checkpoint"]),
        ("--flash-attn", {}, ["--flash-attn has no effect: kernels are chosen"]),
        (
            "-fa on -ngl 99 --jinja",
            {},
            ["-fa on has no", "-ngl 99 has no effect: layers lie on the GPU", "--jinja has"],
        ),
        ("-t 8 -b 2048 -ub 512 -cb", {}, ["-t 8 has no", "-b 2048 has no", "-ub 512 has no", "-cb has no"]),
        ("--no-mmap --mlock --numa distribute", {}, ["--no-mmap has no", "--mlock has no", "--numa distribute has no"]),
        ("--no-enable-chunked-prefill", {}, ["--no-enable-chunked-prefill has no effect: it is always on"]),
        ("--enable-chunked-prefill False", {}, ["--enable-chunked-prefill False has no effect: it is always on"]),
        ("--no-enable-lora", {}, ["--no-enable-lora has no effect: it is off anyway"]),
        ("--limit-mm-per-prompt.image 0", {}, ["--limit-mm-per-prompt.image 0 has no effect: --images-per"]),
        ("--reasoning-format auto", {}, ["--reasoning-format auto has no effect: thoughts come in a field"]),
        ("--enable-auto-tool-choice", {}, ["--enable-auto-tool-choice has no effect: the model may always"]),
        ("--allowed-methods ['*']", {}, ["--allowed-methods ['*'] has no effect: pages of --allowed-origins may use"]),
        ("--mm-encoder-only D", {}, ["--mm-encoder-only D has no effect: images are taken"]),
        ("--async-scheduling --disable-log-stats", {}, ["--async-scheduling has no", "--disable-log-stats has no"]),
    ],
)
def test_what_is_understood_or_passed_over(line, changed, notes):
    for argv in (["DIR", *line.split()], [*line.split(), "DIR"]):
        chosen = given(*argv)
        assert chosen.options == Options(model="DIR", **changed)
        assert len(chosen.notes) == len(notes)
        assert all(said.startswith(begin) for said, begin in zip(chosen.notes, notes, strict=True))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--ctx-size 4096", "--ctx-size: --max-model-len N limits each sequence; llama.cpp's N is shared by all slots"),
        ("-c 4096", "-c: --max-model-len N limits each sequence; llama.cpp's N is shared by all slots"),
        ("-np 4", "-np: --max-num-seqs N says how many sequences run at once; --np are ranks here"),
        ("-ctk q8_0", "-ctk: --kv-cache-dtype fp8 keeps 8 bits; otherwise keys and values have the type of --dtype"),
        (
            "-hf a/b:Q4",
            "-hf: give the hub id in place of the file: phalanx serve ID, or --model ID --f FILE for one GGUF",
        ),
        ("--enable-lora", "--enable-lora: LoRA adapters are not supported; merge one into the model's weights"),
        (
            "--speculative-algorithm EAGLE3",
            "--speculative-algorithm: speculation is set by --speculate, --draft-model and --num-speculative-tokens",
        ),
        ("--enable-expert-parallel", "--enable-expert-parallel: say over how many ranks: --ep N, as many as --tp"),
        ("--download-dir D", "--download-dir: set HF_HOME to where models from the hub lie"),
        ("--hf-overrides {}", "--hf-overrides: write the values into the model's config.json"),
        ("--response-role bot", "--response-role: answers have the role assistant"),
        ("--allow-credentials", "--allow-credentials: there are no cookies here; a page sends the key in a header"),
        ("--nnodes 2", "--nnodes: add --sbatch"),
        ("--nodes 2", "--nodes: add --sbatch"),
        (
            "--device CUDA0",
            "--device 'CUDA0' (command line): one of auto, cpu, cuda, mps is needed; GPUs are chosen by --d 0",
        ),
        (
            "--generation-config D",
            "unexpected argument 'D': the model is given already ('DIR'); several values of an "
            "option have commas between them",
        ),
    ],
)
def test_what_is_refused(line, message):
    assert refusal(*line.split()).startswith(message)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--ctx-sizes", "did you mean --ctx-size?"),  # which is answered in words then
        ("--thread", "did you mean --threads?"),
        ("--max-model-length", "did you mean --max-model-len?"),
        ("--block-sze", "did you mean --block-size?"),
        ("--gpu-memory-utilisation", "did you mean --gpu-memory-utilization?"),
        ("--foo-size", "--help lists the options"),
        ("--cache-format", "--help lists the options"),
        ("--kv-block-size", "--help lists the options"),
        ("--switch-read", "--help lists the options"),
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
