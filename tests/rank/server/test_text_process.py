"""Templates and tokenizers that take any time or memory, or crash: in a process of their own, within limits."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from phalanx.rank import protocol
from phalanx.rank.server import blocking, prompts, text_process
from phalanx.rank.server.api_error import ApiError, PromptTooLong
from phalanx.rank.server.config import SamplingDefaults
from phalanx.rank.server.decoding import convert
from phalanx.rank.server.generation import Generation, LoadedModel, chat_generation, completion_generation
from phalanx.rank.server.prompts import chat_prompt
from phalanx.rank.server.sampling_params import resolve_defaults
from phalanx.rank.server.schema import ChatRequest, CompletionRequest
from phalanx.rank.server.text.load import Text, TextSettings
from phalanx.rank.server.text_process import Limits, RemoteText
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ... import retries
from ...processes import wait
from .conftest import make_model
from .printing import printing

pytestmark = [pytest.mark.timeout(120), retries.CLOCKS]
READY = protocol.Ready(max_model_len=512, vocab_size=400, kv_tokens=4096, block_size=16, max_num_seqs=4, ranks=1)
LIMITS = Limits(seconds=0.5, seconds_when_killing=0.2, memory=128 << 20, loading_seconds=5.0, loading_memory=1 << 30)
# Each is rendered where `attack` is its name; `n` is 10 ** 9, `m` 10 ** 5. What has no variable is folded when parsed.
ATTACKS = {
    "three loops over a text": "{% set t = 'x' * m %}{% for a in t %}{% for b in t %}{% for c in t %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "a power": "{{ 10 ** n }}",
    "doubling": "{% set s = namespace(t='x') %}{% for i in range(40) %}{% set s.t = s.t + s.t %}{% endfor %}",
    "a text times n": "{{ 'a' * n }}",
    "a macro that calls itself": "{% macro m(i) %}{{ m(i) }}{{ m(i) }}{% endmacro %}{{ m(1) }}",
    "a list times n": "{{ [1] * n }}",
    "tojson": "{{ [1] | tojson(indent=n) }}",
    "center": "{{ 'a' | center(n) }}",
    "indent": "{{ 'a\nb' | indent(n) }}",
    "rjust": "{{ 'a'.rjust(n) }}",
    "ljust": "{{ 'a'.ljust(n) }}",
    "zfill": "{{ 'a'.zfill(n) }}",
    "expandtabs": "{{ '\t'.expandtabs(n) }}",
    "replace": "{{ ('a' * m).replace('a', 'a' * m) }}",
    "join": "{{ ('a' * m).join('b' * m) }}",
    "a width of %": "{{ '%1000000000d' % m }}",
    "a width of the format filter": "{{ '%*d' | format(n, 1) }}",
    "a width of str.format": "{{ '{:>1000000000}'.format(m) }}",
    "a width in a width": "{{ '{:>{}}'.format(1, n) }}",
    "lipsum": "{{ lipsum(n=n) }}",
    "batch": "{{ [1] | batch(n, 0) | list }}",
    "slice": "{{ [1] | slice(n) | list }}",
    "urlize": "{{ ('(' * m * 100) | urlize }}",
    "sorting": "{% for i in range(99999) %}{% set x = range(99999) | sort(reverse=true) %}{% endfor %}",
}
BRANCHES = "".join(f"{{% elif attack == {name!r} %}}{source}" for name, source in ATTACKS.items())
TEMPLATE = f"{{% if not attack %}}{{{{ messages[0].content }}}}{BRANCHES}{{% endif %}}"


def chat(text, content="hi", **variables):
    request = convert({"messages": content, "chat_template_kwargs": {"m": 10**5, **variables}}, ChatRequest)
    return text.run(chat_prompt, request, READY, None)


def tokens(text, content="hi"):
    return text.run(text_process.encode, content, False)


@pytest.fixture
def opened():
    texts = []

    def open_text(directory, limits=LIMITS, **settings):
        texts.append(RemoteText(TextSettings(str(directory), **settings), limits))
        return texts[-1]

    yield open_text
    for text in texts:
        text.close()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    text = RemoteText(TextSettings(str(make_model(tmp_path_factory.mktemp("m") / "m", TEMPLATE))), LIMITS)
    yield text
    text.close()


@pytest.mark.sample(4)  # of loops, of recursion, and of memory in several ways: each takes what its limit allows
@pytest.mark.parametrize("attack", ATTACKS)
def test_templates_that_take_too_much(attacked, attack):
    with pytest.raises(ApiError) as error:
        chat(attacked, attack=attack, n=10**9)
    assert error.value.status == 400
    assert attacked.tokenizer.decode(chat(attacked).tokens) == "hi"  # the next one has a worker again


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ [1] * 2 * 10**9 }}",
        "{% set x = [1] * 2 * 10**9 %}{{ x }}",
        "{{ 10 ** (10 ** 9) }}",
        "{% if 10 ** (10 ** 9) > 1 %}{% endif %}",
        "{{ 'a' * 300000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 'a' | center(1000000000) }}",
        "(" * 5000,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 100000 + " }}",
        "{% if x %}" * 3000 + "{% endif %}" * 3000,
    ],
    ids=range(12),
)
def test_templates_that_take_too_much_when_they_are_parsed(tmp_path, opened, source):
    """Constants are folded then. What cannot be folded within the limits is left for the request."""
    model = make_model(tmp_path / "m", source)
    limits = Limits(seconds=0.5, memory=128 << 20, loading_seconds=1.0, loading_memory=256 << 20)
    try:
        chat(opened(model, limits))
    except (ValueError, ApiError) as error:
        assert str(error)
    else:
        assert source == "(" * 5000


def with_tokenizer(path, **parts):
    """A model whose tokenizer.json has these parts."""
    model = make_model(path)
    data = json.loads((model / "tokenizer.json").read_text())
    for name, part in parts.items():
        data[name] = part if isinstance(part, dict | list) else json.loads(part.__getstate__())
    (model / "tokenizer.json").write_text(json.dumps(data))
    return model


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


GROWS = normalizers.Sequence([normalizers.Replace("b", "bbbbbbbbbb")] * 12)
TOKENIZERS = {
    "a pattern that backtracks": ({"pre_tokenizer": split("(z+z+)+y")}, "z" * 60),
    "a pattern of quadratic time": ({"pre_tokenizer": split(r"\s+$")}, " " * 100_000 + "x"),
    "a normalizer's pattern": ({"normalizer": normalizers.Replace(Regex("(z+z+)+y"), "")}, "z" * 60),
    "a normalizer that grows texts": ({"normalizer": GROWS}, "b"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers_that_take_too_much(tmp_path, opened, kind):
    parts, content = TOKENIZERS[kind]
    text = opened(with_tokenizer(tmp_path / "m", **parts))
    for call in (tokens, chat):
        with pytest.raises(ApiError) as error:
            call(text, content)
        assert (error.value.status, error.value.code) == (400, "text_limits")
    assert tokens(text)


@pytest.mark.long
def test_a_tokenizer_of_long_tokens(tmp_path, opened):
    """A unigram model tries all of a token at each character."""
    pieces = [("<unk>", 0.0), *((char, -1.0) for char in "▁Helowrd!aq"), ("q" * 60_000, -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.decoder = decoders.Metaspace()
    model = make_model(tmp_path / "m")
    tokenizer.save(str(model / "tokenizer.json"))
    text = opened(model)
    with pytest.raises(ApiError) as error:
        tokens(text, "q" * 200_000)
    assert error.value.code == "text_limits" and tokens(text)


def big_token(length):
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "x" * length: 1}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    return made


def special_token(length):
    made = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.add_special_tokens([AddedToken("<" + "x" * length)])
    return made


def decoder(step):
    made = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.decoder = decoders.Sequence([decoders.Fuse(), step])
    return made


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "made",
    [
        big_token(100_000),
        special_token(300_000),  # whose beginnings would take 45 GB
        decoder(decoders.Replace(Regex("(z+z+)+y"), "")),
        decoder(decoders.Replace("a", "a" * 100)),
    ],
    ids=["a token", "a special token", "a decoder's pattern", "a decoder that grows texts"],
)
def test_tokenizers_that_are_refused(tmp_path, opened, made):
    model = make_model(tmp_path / "m")
    made.save(str(model / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"token|memory"):
        opened(model)


def test_a_tokenizer_that_fails_at_once_is_refused_when_it_is_read(tmp_path, opened):
    with pytest.raises(ValueError, match="retry-limit"):
        opened(with_tokenizer(tmp_path / "m", pre_tokenizer=split("(a+a+)+y")))


@pytest.mark.long
def test_a_template_that_never_ends_is_refused_when_it_is_read(tmp_path, opened):
    with pytest.raises(ValueError, match="more than 5 s"):
        opened(make_model(tmp_path / "m", ATTACKS["three loops over a text"].replace("x' * m", "x' * 100000")))


def test_others_go_on_meanwhile(tmp_path, opened):
    text = opened(make_model(tmp_path / "m", TEMPLATE), Limits(seconds=60.0))
    failed = []

    def attack():
        try:
            chat(text, attack="three loops over a text")
        except ApiError as error:
            failed.append(error)

    thread = threading.Thread(target=attack)
    thread.start()
    assert all(chat(text).tokens for _ in range(20))
    assert not wait(lambda: len(children(text)) < 2, 20) and thread.is_alive()
    for pid in children(text):  # one of them is busy
        os.kill(pid, signal.SIGABRT)
    thread.join(20)
    assert [error.code for error in failed] == ["text_limits"] and chat(text).tokens


def test_what_others_kill_is_asked_for_again_and_counts_when_it_is_killed_again(tmp_path, opened):
    """A kernel without memory kills workers before anything else, and so those that took the memory."""
    text = opened(make_model(tmp_path / "m", TEMPLATE), Limits(seconds=60.0, seconds_when_killing=0.1))
    failed = []

    def ask():
        try:
            chat(text, attack="three loops over a text")
        except ApiError as error:
            failed.append(error)

    for _ in range(text_process.KILLS):
        thread = threading.Thread(target=ask)
        thread.start()
        while thread.is_alive():
            for pid in children(text):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
    assert [(error.status, error.retry_after) for error in failed] == [(503, 1)] * text_process.KILLS
    assert chat(text).tokens
    ask()
    assert (failed[-1].status, failed[-1].code) == (400, "text_limits")


def kill(text):
    """The process that forks workers, and so these."""
    pid = text.process.pid
    os.kill(pid, signal.SIGKILL)
    assert not wait(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z", 10)


def children(text):
    pid = text.process.pid
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_grammars_that_take_too_much_to_check(tmp_path, opened):
    text = opened(make_model(tmp_path / "m"))
    texts = [{"type": "string", "pattern": f".{{0,40}}a.{{{k}}}b"} for k in range(1, 14)]
    schema = {"type": "object", "properties": {"a": {"allOf": texts}}}
    model = LoadedModel(text, READY, resolve_defaults(SamplingDefaults(), {}), None)
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    for kind, make, fields in (
        (CompletionRequest, completion_generation, {"prompt": "x", "guided_json": schema}),
        (ChatRequest, chat_generation, {"messages": "x", "tools": [tool]}),
    ):
        unchecked = make(model, convert(fields, kind))
        assert not isinstance(unchecked, Generation)
        with pytest.raises(ApiError) as error:
            unchecked()
        assert (error.value.status, error.value.code) == (400, "text_limits") and "grammar" in error.value.message
    assert make(model, convert({"messages": "x"}, kind)).grammar == ""


def test_requests_that_come_together_have_one_vocabulary(tmp_path, opened):
    """Rank 0 drops what it compiles for one when another comes."""
    text = opened(make_model(tmp_path / "m"))
    made, ready = [], threading.Barrier(4)
    threads = [threading.Thread(target=lambda: (ready.wait(), made.append(text.vocabulary(400)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4 and all(one is made[0] for one in made)


def test_the_limit_is_short_where_requests_are_ended_often(tmp_path, opened):
    text = opened(
        make_model(tmp_path / "m", TEMPLATE), Limits(seconds=0.3, seconds_when_killing=0.1, seconds_per_byte=0.0)
    )
    said = []
    for whose in ["a key"] * 4 + ["another"]:
        blocking.owner.set(whose)
        with pytest.raises(ApiError) as error:
            chat(text, attack="three loops over a text")
        said.append(error.value.message)
    assert all("0.3 s" in one for one in (*said[:3], said[4]))
    assert "0.1 s" in said[3]


def test_closing_waits_for_no_process_that_reads_files(tmp_path, opened):
    """A template that never ends, put there while the process was away."""
    model = make_model(tmp_path / "m")
    text = opened(model, Limits(loading_seconds=100.0))
    (model / "chat_template.jinja").write_text(ATTACKS["three loops over a text"].replace("m %}", "100000 %}"))
    kill(text)
    refused, old = [], text.process.pid

    def ask():
        try:
            tokens(text)
        except ApiError as error:
            refused.append(error.status)

    thread = threading.Thread(target=ask)
    thread.start()
    assert not wait(lambda: text.process.pid in (0, old), 10)
    pid = text.process.pid
    began = time.monotonic()
    text.close()
    thread.join(10)
    assert time.monotonic() - began < 10 and refused == [503] and not Path(f"/proc/{pid}").exists()


def test_what_it_prints_is_logged(tmp_path, opened, caplog):
    """Cut and limited as the server's own lines are, and not on a stream that it could wait for."""
    opened(make_model(tmp_path / "m")).run(printing, 20)
    assert not wait(lambda: sum(one.count("a line") for one in caplog.messages) < 20, 10)
    assert len(caplog.records) < 20


def test_the_server_keeps_its_memory(attacked):
    before = int(Path("/proc/self/statm").read_text().split()[1])
    for attack in ("a text times n", "doubling"):
        with pytest.raises(ApiError):
            chat(attacked, attack=attack, n=10**8)
    assert (int(Path("/proc/self/statm").read_text().split()[1]) - before) * 4096 < 32 << 20


def test_a_worker_that_has_taken_much_gives_it_back(attacked):
    assert chat(attacked).tokens
    (before,) = children(attacked)
    with pytest.raises(PromptTooLong):
        chat(attacked, content="some words " * 2_000_000)
    assert before not in children(attacked) and chat(attacked).tokens


def test_what_ends_is_started_again(attacked):
    assert chat(attacked).tokens
    (pid,) = children(attacked)
    os.kill(pid, signal.SIGKILL)  # while it has nothing to do
    assert not wait(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z", 10)
    assert chat(attacked).tokens
    kill(attacked)
    assert chat(attacked).tokens


def test_the_same_as_in_one_process(attacked):
    local = Text(str(attacked._settings.model_dir))
    for content in ("hi", "naïve 你好 🙂 <|end|>", "a" * 300):
        assert chat(attacked, content) == chat(local, content)
    assert local.tokenizer.pieces() == [attacked.tokenizer.piece(id) for id in range(local.tokenizer.size)]
    for name in ("end_tokens", "generation", "pooling", "tool_format", "reasoning", "chats", "takes_tools", "family"):
        assert getattr(local, name) == getattr(attacked, name)
    for name in ("added", "special", "size", "bytewise"):
        assert getattr(local.tokenizer, name) == getattr(attacked.tokenizer, name)
    assert attacked.vocabulary(400) == local.vocabulary(400)
    assert attacked.tokenizer.token_id("<|end|>") == local.tokenizer.token_id("<|end|>")


def test_numbers_that_msgpack_has_not(tmp_path, opened):
    text = opened(make_model(tmp_path / "m", "{{ n }} {{ x }} {{ tools[0].function.parameters.maximum }}"))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}
    request = convert({"messages": "hi", "tools": [tool], "chat_template_kwargs": {"n": 2**70, "x": 1.5}}, ChatRequest)
    found = text.run(chat_prompt, request, READY, None)
    assert text.tokenizer.decode(found.tokens) == f"{2**70} 1.5 {10**30}"


def test_a_tokenizer_whose_tokens_depend_on_their_neighbours(tmp_path, opened):
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "hel": 1, "##lo": 2, "world": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    model = make_model(tmp_path / "m")
    made.save(str(model / "tokenizer.json"))
    text = opened(model)
    assert not text.tokenizer.bytewise and tokens(text, "hello world") == [1, 2, 3]
    assert text.tokenizer.decode([1, 2, 3]) == "hello world"


def test_texts_that_utf8_cannot_have(tmp_path, opened):
    """A template may write half of a surrogate pair, and quote it in an error."""
    text = opened(make_model(tmp_path / "m", r"{{ raise_exception('\ud800') if x else '\ud800' }}"))
    for variables in ({"x": 1}, {}):
        with pytest.raises(ApiError):
            chat(text, **variables)
    assert tokens(text)


def test_an_error_quotes_little(tmp_path, opened):
    text = opened(make_model(tmp_path / "m", "{{ raise_exception('x' * 1000000) }}"))
    with pytest.raises(ApiError) as error:
        chat(text)
    assert len(error.value.message) < 2000


def test_only_this_process_writes_to_a_worker(attacked):
    """Requests are pickled, so no client's bytes may be read so: they are data within."""
    assert chat(attacked, pickle.dumps(os.getpid, 0).decode()).tokens


def test_no_option_or_key_is_in_its_environment(tmp_path, opened, monkeypatch):
    monkeypatch.setenv("PHALANX_API_KEY", "secret")
    text = opened(make_model(tmp_path / "m"))
    assert b"secret" not in Path(f"/proc/{text.process.pid}/environ").read_bytes()


SCRIPT = """
import sys, threading, time
from phalanx.rank.server import text_process
from phalanx.rank.server.text.load import TextSettings
from tests.rank.server.test_text_process import chat
text = text_process.RemoteText(TextSettings(sys.argv[1]), text_process.Limits(seconds=60.0))
threading.Thread(target=chat, args=(text,), kwargs={"attack": "three loops over a text"}, daemon=True).start()
while not open(f"/proc/{text.process.pid}/task/{text.process.pid}/children").read():
    time.sleep(0.01)
print(text.process.pid, flush=True)
time.sleep(60)  # until it is killed
"""


def test_hard_limits_of_the_shell(tmp_path):
    """Batch systems set `ulimit -v`: no process may have more, nor say that it may."""
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))\n"
        "from tests.rank.server.test_text_process import LIMITS, RemoteText, TextSettings, chat\n"
        "text = RemoteText(TextSettings(sys.argv[1]), LIMITS)\n"
        "print(len(chat(text).tokens) > 0)\n"
        "text.close()"
    )
    line = [sys.executable, "-c", code, str(make_model(tmp_path / "m"))]
    done = subprocess.run(line, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


def test_files_that_are_damaged_meanwhile_fail_requests_only(tmp_path, opened):
    text = opened(make_model(tmp_path / "m"))
    config = tmp_path / "m" / "tokenizer_config.json"
    right = config.read_bytes()
    config.write_text("[")
    kill(text)
    with pytest.raises(ApiError) as error:
        chat(text)
    assert error.value.status == 503
    config.write_bytes(right)
    assert chat(text).tokens


def test_nothing_is_left_when_the_server_is_killed(tmp_path):
    """A worker is computing meanwhile."""
    model = make_model(tmp_path / "m", TEMPLATE)
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(model)], stdout=subprocess.PIPE, cwd=root) as process:
        pid = int(process.stdout.readline())
        workers = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        process.kill()
    assert workers and not wait(lambda: any(Path(f"/proc/{one}").exists() for one in (pid, *workers)), 10)


@pytest.mark.long
def test_the_longest_text_has_the_memory_it_needs(monkeypatch, tmp_path, opened):
    """At the usual limits, as far as texts are encoded at all."""
    text = opened(make_model(tmp_path / "m"), text_process.LIMITS)
    assert len(tokens(text, "hello 你 " * (prompts.LARGEST // 8))) > prompts.LARGEST // 8
