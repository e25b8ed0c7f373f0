"""The table of options: one of each kind can be given in every way, and a wrong value is one clear line."""

import json
import selectors
import socket

import msgspec
import pytest
from phalanx.launcher.cli import verbs
from phalanx.launcher.commands.chat.options import ChatOptions
from phalanx.launcher.options.compat_flags import COMPAT_FLAGS, OTHER_NAMES
from phalanx.launcher.options.option_sources import UsageError, from_keywords, read
from phalanx.rank.options import (
    GROUPS,
    IN_SITU,
    LONGEST,
    STORED,
    Job,
    Options,
    decode_job,
    degrees,
    encode_job,
    specs,
)
from phalanx.rank.server.fields import properties
from phalanx.rank.server.schema import ChatRequest

TABLE = specs()
SAMPLES = {str: "word", int: "7", float: "0.5", tuple: "2,0,1"}
VALUES = {str: "word", int: 7, float: 0.5, tuple: (2, 0, 1)}


def sample(spec):
    """A text that is not the default, and its value."""
    if spec.item is str:
        return "a,b", ("a", "b")
    if spec.flag.choices:
        chosen = next(one for one in spec.flag.choices if one != spec.default)
        return chosen, chosen
    if spec.type is float and spec.flag.low and spec.flag.low > 0.5:
        return "7.5", 7.5
    return SAMPLES[spec.type], VALUES[spec.type]


def given(*argv, **environ):
    return read(Options, argv, environ)


# Options that are read alike; of each kind the one with most flags stands for all.
ALIKE = sorted(TABLE.values(), key=lambda spec: len(spec.flag.flags))
KINDS = {(spec.type, spec.item, spec.optional, bool(spec.flag.choices), spec.default is True): spec for spec in ALIKE}
kinds = pytest.mark.parametrize("spec", list(KINDS.values()), ids=lambda spec: spec.name)
named = pytest.mark.parametrize("spec", TABLE.values(), ids=list(TABLE))


@pytest.mark.parametrize("spec", [spec for spec in KINDS.values() if spec.type is not bool], ids=lambda spec: spec.name)
@pytest.mark.parametrize("equals", [False, True], ids=["space", "equals"])
def test_a_flag_sets_its_option(spec, equals):
    text, value = sample(spec)
    flag = spec.flag.flags[-1]
    chosen = given(f"{flag}={text}") if equals else given(flag, text)
    assert getattr(chosen.options, spec.name) == value
    assert chosen.origins[spec.name] == f"command line ({flag})"
    others = {name: origin for name, origin in chosen.origins.items() if name != spec.name}
    assert set(others.values()) == {"default"}


@pytest.mark.parametrize("spec", [spec for spec in TABLE.values() if spec.type is bool], ids=lambda spec: spec.name)
def test_every_boolean_is_switched_on_and_off(spec):
    assert getattr(given(spec.flag.flags[0]).options, spec.name) is True
    assert getattr(given(f"{spec.flag.flags[0]}=off").options, spec.name) is False
    assert spec.flag.off  # a boolean that cannot be switched off
    for off in spec.flag.off:
        assert getattr(given(off).options, spec.name) is False


@kinds
def test_environment(spec):
    text, value = ("off" if spec.default else "on", not spec.default) if spec.type is bool else sample(spec)
    chosen = given(**{spec.env: text})
    assert getattr(chosen.options, spec.name) == value
    assert chosen.origins[spec.name] == f"environment ({spec.env})"


@kinds
def test_yaml(spec, tmp_path):
    text, value = ("false" if spec.default else "true", not spec.default) if spec.type is bool else sample(spec)
    file = tmp_path / "serve.yaml"
    for key in (spec.name, spec.name.replace("_", "-"), spec.flag.flags[0].lstrip("-")):
        file.write_text(f"{key}: {text}\n")
        chosen = given("--config", str(file))
        assert getattr(chosen.options, spec.name) == value
        assert chosen.origins[spec.name] == f"{file} ({key})"


@kinds
def test_keyword(spec):
    value = (not spec.default) if spec.type is bool else sample(spec)[1]
    assert getattr(from_keywords(Options, {spec.name: value}, {}, "LLM"), spec.name) == value


def test_the_command_line_wins_over_environment_over_file_over_default(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nmem: 1\nmax-num-seqs: 1\n")
    chosen = given("--config", str(file), "--p", "3", PHALANX_PORT="2", PHALANX_MEM="2")
    options = chosen.options
    assert (options.port, options.mem, options.max_num_seqs, options.queue_size) == (3, 2, 1, 1024)


def test_config_from_the_environment_and_as_a_list(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("d: [1, 0]\ntop-k:\n")
    assert given(PHALANX_CONFIG=str(file)).options.devices == (1, 0)


@pytest.mark.parametrize(
    "argv",
    [["http://a,http://b"], ['["http://a", "http://b"]'], ["http://a", "http://b"], ['["http://a"]', " http://b , "]],
)
def test_a_list_of_texts_is_written_in_many_ways(argv, tmp_path):
    words = [word for text in argv for word in ("--allowed-origins", text)]
    assert given(*words).options.allowed_origins == ("http://a", "http://b")
    file = tmp_path / "serve.yaml"
    file.write_text(f"allowed-origins: {json.dumps(argv)}\n")
    assert given("--config", str(file)).options.allowed_origins == ("http://a", "http://b")


def test_an_empty_variable_is_unset():
    assert given(PHALANX_PORT="").options.port == 2000


@named
def test_table(spec):
    assert spec.flag.group in GROUPS
    assert spec.flag.help and len(spec.flag.help) < 70
    assert all(flag.startswith("--") for flag in (*spec.flag.flags, *spec.flag.off))
    assert (spec.flag.metavar or spec.flag.choices) or spec.type is bool


SCOPES = {("engine",), ("launcher",), ("server",), ("server", "batch")}


@named
def test_every_option_has_a_scope(spec):
    assert spec.flag.scope in SCOPES
    assert not (spec.flag.secret or spec.flag.runs_code) or spec.flag.scope == ("server",)  # ranks need none of them


def test_no_flag_means_two_things():
    known = [flag for spec in TABLE.values() for flag in (*spec.flag.flags, *spec.flag.off)]
    flags = [*known, *OTHER_NAMES, *COMPAT_FLAGS]
    assert len(set(flags)) == len(flags)
    # --hostfile is refused in words that name the remedy
    assert not set(verbs()) & {flag.lstrip("-") for flag in known}


def test_names_of_candle_vllm_and_vllm():
    options = given(
        *"--h 0.0.0.0 --p 1 --w DIR --d 0,1 --mem 4096 --dtype bfloat16 --prefill-chunk-size 8192".split(),
        *"--penalty 1.1 --thinking --disable-prefix-cache --log --tensor-parallel-size 2".split(),
        *"--served-model-name a --max-model-len 100 --pipeline-parallel-size 3".split(),
    ).options
    expected = Options(
        host="0.0.0.0", port=1, model="DIR", devices=(0, 1), mem=4096, dtype="bf16", max_num_batched_tokens=8192,
        repetition_penalty=1.1, thinking=True, prefix_cache=False, log=True, tp=2, served_model_name="a",
        max_model_len=100, pp=3,
    )  # fmt: skip
    assert options == expected
    for words in ("--weight-path DIR", "--model-id DIR", "--m DIR", "--model DIR", "DIR"):
        assert given(*words.split()).options.model == "DIR"
    for words in ("--device-ids 0,1", "--devices 0,1"):
        assert given(*words.split()).options.devices == (0, 1)
    assert given("--kvcache-mem-gpu", "5").options.mem == 5


def test_gpu_memory_utilization_is_said_to_be_a_share_of_free_memory():
    chosen = given("--gpu-memory-utilization", "0.9")
    assert chosen.options.kv_fraction == 0.9
    (note,) = chosen.notes
    assert "--gpu-memory-utilization" in note and "--kv-fraction" in note and "free" in note


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--p abc", "--port 'abc' (command line): a whole number is needed"),
        ("--port abc", "--port 'abc' (command line): a whole number is needed"),
        ("--port 70000", "--port '70000' (command line): must be at most 65535"),
        ("--port -1", "--port '-1' (command line): must be at least 0"),
        ("--temperature hot", "--temperature 'hot' (command line): a number is needed"),
        ("--temperature nan", "--temperature 'nan' (command line): must be at least 0"),
        ("--top-p 1.5", "--top-p '1.5' (command line): must be at most 1"),
        ("--dtype fp4", "--dtype 'fp4' (command line): one of auto, bf16, f16, f32 is needed"),
        ("--isq q9_9", f"--isq 'q9_9' (command line): one of none, {', '.join(IN_SITU)} is needed"),
        (
            "--quantization q9_9",
            f"--quantization 'q9_9' (command line): one of auto, {', '.join(STORED)} is needed",
        ),
        ("--device 1", "--device '1' (command line): one of auto, cpu, cuda, mps is needed; GPUs are chosen by --d 1"),
        ("--d 0,x", "--d '0,x' (command line): a list of whole numbers such as 0,1,2,3 is needed"),
        ("--d 0,0", "--d '0,0' (command line): a device is listed twice"),
        ("--d 0,-1", "--d '0,-1' (command line): must be at least 0"),
        ("--strict=maybe", "--strict 'maybe' (command line): on or off is needed"),
        ("--no-strict=on", "--no-strict 'on' (command line): this flag takes no value"),
        ("--port", "--port needs a value: --port N"),
        ("--port --log", "--port needs a value: --port N"),
        ("--config", "--config needs a value: --config FILE"),
        (
            "DIR OTHER",
            "unexpected argument 'OTHER': the model is given already ('DIR'); several values of an "
            "option have commas between them",
        ),
        (
            "--w DIR OTHER",
            "unexpected argument 'OTHER': the model is given already ('DIR'); several values of an "
            "option have commas between them",
        ),
        ("--tens 2", "unknown option --tens; did you mean --tensor-parallel-size?"),
        ("--tpp 2", "unknown option --tpp; did you mean --tp?"),
        ("--tensor-paralel-size 2", "unknown option --tensor-paralel-size; did you mean --tensor-parallel-size?"),
        ("--max_model_len 2", "unknown option --max_model_len; did you mean --max-model-len?"),
        ("-p 2000", "unknown option -p; did you mean --p?"),
        ("--prot=3", "unknown option --prot; did you mean --port?"),
        ("--zzz", "unknown option --zzz; --help lists the options"),
        ("--show-confg", "unknown option --show-confg; did you mean --show-config?"),
    ],
)
def test_wrong_words(argv, message):
    with pytest.raises(UsageError) as error:
        given(*argv.split())
    expected = message.replace("--port '", f"{argv.split()[0].partition('=')[0]} '", 1)
    assert str(error.value) == expected
    assert error.value.code == 2
    assert error.value.everywhere  # every rank has this command line: one of them says it


def test_wrong_environment():
    with pytest.raises(UsageError) as error:
        given(PHALANX_PORT="abc")
    assert "PHALANX_PORT 'abc' (environment):" in str(error.value)
    assert not error.value.everywhere
    assert read(Options, ["--d", "1"], {"PHALANX_PORT": "abc"}, strict=False).options == Options()


def test_a_variable_that_is_almost_an_option_is_mentioned():
    (note,) = given(PHALANX_PROT="1").notes
    assert "PHALANX_PROT" in note and "PHALANX_PORT" in note
    assert given(PHALANX_JOB="{}", PHALANX_TEST_HOST="1").notes == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot: 1", "--config FILE: unknown key 'prot'; did you mean port?"),
        ("zzz: 1", "--config FILE: unknown key 'zzz'"),
        ("port: abc", "port 'abc' (FILE): a whole number is needed"),
        ("port: [1, 2]", "port [1, 2] (FILE): one value is needed"),
        ("port: {a: 1}", "port {'a': 1} (FILE): one value is needed"),
        ("port:", "port None (FILE): one value is needed"),
        ("- port", "--config FILE: lines such as `port: 2000` are expected, not a list"),
        ("a: b: c", "--config FILE: not YAML: mapping values are not allowed here"),
    ],
)
def test_wrong_yaml(content, message, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    with pytest.raises(UsageError) as error:
        given("--config", str(file))
    assert str(error.value).startswith(message.replace("FILE", str(file)))
    assert "\n" not in str(error.value)


def test_a_missing_config(tmp_path):
    with pytest.raises(UsageError, match="--config /nowhere.yaml.*file"):
        given("--config", "/nowhere.yaml")


def test_wrong_keywords():
    with pytest.raises(UsageError, match=r"LLM.*'nps'; did you mean np\?"):
        from_keywords(Options, {"nps": 2}, {}, "LLM")
    with pytest.raises(UsageError, match=r"np 'x' \(argument of LLM\)"):
        from_keywords(Options, {"np": "x"}, {}, "LLM")


def test_candle_vllms_model_subcommand_is_passed_over():
    chosen = given("--w", "DIR", "llama3", "--temperature", "0.")
    assert chosen.options == Options(model="DIR", temperature=0.0)
    (note,) = chosen.notes
    assert "'llama3'" in note and "config.json" in note


def test_after_two_dashes_comes_the_model():
    assert given("--", "--odd").options.model == "--odd"


def test_the_last_one_wins():
    assert given("--p", "1", "--port", "2").options.port == 2


def test_a_job_survives_the_environment():
    job = Job(options=Options(devices=(0, 1), temperature=0.5, model="/ü"), server_socket="/s")
    assert decode_job(encode_job(job)) == job
    with pytest.raises(AttributeError):
        job.options.port = 1  # type: ignore[misc]
    assert msgspec.structs.replace(job.options, port=1).port == 1


@pytest.mark.parametrize(
    "size, tp, pp, dp, want",
    [
        (6, 0, 0, 0, (6, 1, 1)),
        (6, 3, 0, 0, (3, 2, 1)),
        (6, 0, 3, 0, (2, 3, 1)),
        (6, 2, 3, 0, (2, 3, 1)),
        (1, 0, 0, 0, (1, 1, 1)),
        (6, 0, 0, 2, (3, 1, 2)),
        (12, 2, 0, 3, (2, 2, 3)),
        (12, 0, 2, 3, (2, 2, 3)),
        (12, 2, 2, 3, (2, 2, 3)),
    ],
)
def test_degrees(size, tp, pp, dp, want):
    assert degrees(size, tp, pp, dp) == want
    assert degrees(size, tp, pp, dp, ep=want[0]) == want


def test_experts_are_shared_out_within_a_tensor_group():
    assert degrees(8, 4, 0, 2, ep=2) == (4, 1, 2)
    for ep in (3, 8):
        with pytest.raises(ValueError, match=f"--ep {ep} .*--tp 4.*replicas"):
            degrees(8, 4, 0, 2, ep=ep)


@pytest.mark.parametrize(
    "size, tp, pp, dp, message",
    [
        (6, 4, 0, 0, "--tp 4 does not divide the 6 ranks"),
        (6, 0, 4, 0, "--pp 4 does not divide the 6 ranks"),
        (6, 0, 0, 4, "--dp 4 does not divide the 6 ranks"),
        (6, 2, 2, 0, "--tp 2 times --pp 2 is 4, but there are 6 ranks"),
        (8, 2, 2, 0, "--tp 2 times --pp 2 is 4, but there are 8 ranks; --dp 2 serves as many replicas"),
        (8, 2, 1, 2, "--tp 2 times --pp 1 times --dp 2 is 4, but there are 8 ranks"),
        (6, 2, 0, 2, "--tp 2 times --dp 2 is 4, but there are 6 ranks"),
    ],
)
def test_degrees_that_do_not_fit(size, tp, pp, dp, message):
    with pytest.raises(ValueError) as error:
        degrees(size, tp, pp, dp)
    assert str(error.value) == message


def test_the_longest_timeout_can_be_waited_for():
    """Linux' polls take an int of milliseconds; a longer one ended every job of several ranks at its start."""
    assert TABLE["timeout"].flag.high == LONGEST
    reading, writing = socket.socketpair()
    with reading, writing, selectors.DefaultSelector() as selector:
        writing.send(b"x")
        selector.register(reading, selectors.EVENT_READ)
        assert selector.select(LONGEST)
        reading.settimeout(LONGEST)
        with pytest.raises(OverflowError):
            selector.select(3 * LONGEST)


@pytest.mark.parametrize("options", [Options, ChatOptions])
def test_sampling_has_the_limits_and_the_meaning_of_requests(options):
    with pytest.raises(UsageError, match="must be at most 100"):
        read(options, ["--temperature", "101"], {})
    assert specs(options)["temperature"].flag.help == properties(ChatRequest)["temperature"]["description"]
