"""Models with fewer tokens than their tokenizer, whose last tokens are for models of other sizes (Gemma 3 1B)."""

import json

import numpy as np
import pytest
import tokenizers
from llguidance import LLTokenizer
from phalanx.rank import protocol
from phalanx.rank.scheduler.grammar_process import Compiler, mask_words
from phalanx.rank.server.text import tokenizer_file
from phalanx.rank.server.text.load import Text
from tokenizers import AddedToken, models, pre_tokenizers

from .conftest import make_model

pytestmark = pytest.mark.timeout(60)
USER = [{"role": "user", "content": "look: <extra1>"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def compiles(vocabulary, grammar):
    """Whether a worker of rank 0 makes a mask of it."""
    ends = list(vocabulary.ends) or None
    tokenizer = LLTokenizer(vocabulary.tokenizer, n_vocab=vocabulary.size, eos_token=ends)
    bits = np.zeros(mask_words(vocabulary), np.int32)
    Compiler(tokenizer, vocabulary.ends).matcher(grammar, (), 0).mask(bits)
    return bool(bits.any())


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A model directory with three more tokens than other tests have, one of them the marker of the model's calls."""
    directory = make_model(tmp_path_factory.mktemp("larger") / "model")
    file = directory / "tokenizer.json"
    made = tokenizers.Tokenizer.from_file(str(file))
    size = made.get_vocab_size()
    made.add_tokens([AddedToken(f"<extra{i}>", special=i == 1) for i in range(3)])
    made.save(str(file))
    return directory, size


@pytest.fixture
def server(start_server, larger):
    directory, size = larger
    ready = protocol.Ready(max_model_len=512, vocab_size=size, kv_tokens=4096, block_size=16, max_num_seqs=4, ranks=1)
    return start_server(model=directory, scheduler={"ready": ready})


def test_a_prompt_that_spells_such_a_token(server):
    assert server.post("chat/completions", messages=USER).status == 200
    assert "look: <extra1>" in server.asked
    assert server.post("completions", prompt="<extra0><extra1><extra2>").status == 200
    assert server.asked == "<extra0><extra1><extra2>"
    assert max(protocol.unpack_u32(server.scheduler.requests[-1].tokens)) < server.scheduler.ready.vocab_size
    assert server.post("completions", prompt="a", stop=["<extra1>"], bad_words=["<extra2>"]).status == 200
    answer = server.request("POST", "/tokenize", {"prompt": "<extra1>"}).body
    assert max(answer["tokens"]) < server.scheduler.ready.vocab_size


@pytest.mark.parametrize("config", [{"vocab_size": -1}, {"text_config": {"vocab_size": -1}}], ids=["own", "inner"])
def test_the_tokenizer_is_cut_before_the_first_request(start_server, larger, config):
    directory, size = larger
    file = directory / "config.json"
    before = file.read_text()
    file.write_text(json.dumps(config).replace("-1", str(size)))
    try:
        server = start_server(model=directory)
    finally:
        file.write_text(before)
    text = server.engine.text
    assert text.tokenizer.end > size and len(text._cuts) == 1


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_regex": "[a-z]+"},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},
    ],
    ids=lambda asked: [*asked][-1],
)
def test_grammars(server, asked):
    assert server.post("chat/completions", messages=USER, **asked).status == 200
    (vocabulary,), (request,) = server.scheduler.vocabularies, server.scheduler.requests
    assert compiles(vocabulary, request.grammar)


@pytest.mark.parametrize("size", [270, 300, 391])
def test_tokens_in_the_midst_of_merges(larger, size):
    directory, _ = larger
    text = Text(str(directory)).within(size)
    assert text.tokenizer.end <= size and text.within(size) is text
    for words in ("hello world, how are you?", "<extra1>", "你好 naïve 🙂"):
        tokens = text.tokenizer.encode(words, False)
        assert text.tokenizer.decode(tokens) == words and max(tokens) < size
    assert compiles(text.vocabulary(size), 'start: "hello"')


def test_the_whole_tokenizer_where_it_fits(larger):
    directory, size = larger
    text = Text(str(directory))
    assert text.within(size + 3) is text and text.within(size) is text.within(size) is not text
    assert text.tokenizer.encode("<extra1>", False) == [size + 1]


def test_other_kinds_of_vocabularies():
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), *((char, -1.0) for char in "abc"), ("ab", -0.5)], 0))
    words = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "##bc": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert tokenizer_file.without(unigram, 4).encode("abc").ids == [1, 2, 3]
    assert tokenizer_file.without(words, 3).encode("ab").ids == [1, 2]
    assert json.loads(tokenizer_file.without(unigram, 4).to_str())["added_tokens"] == []
