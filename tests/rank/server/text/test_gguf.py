"""Tokenizers in GGUF files: token ids are those of the libraries that the models came with."""

import time

import gguf
import pytest
from phalanx.rank.server.text import gguf as text
from phalanx.rank.server.text import sentencepiece, tokenizer_file
from phalanx.rank.server.text.load import Text
from phalanx.rank.server.text.tokenizer import ALPHABET, Tokenizer
from tokenizers import Tokenizer as Library

from .... import gguf_files
from ....checkpoints import make_checkpoint
from .test_tokenizer_file import KINDS, TEXTS, TYPES, train


def write(file, **keys):
    """A file of metadata alone. keys: of tokenizer.ggml, or with a full name."""
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in keys.items():
        if value is not None:
            gguf_files._add(writer, key if "." in key else f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def keys_of(directory, **more):
    """The keys of a byte-level tokenizer.json."""
    return gguf_files.tokenizer(directory) | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def test_byte_level(tiny, tmp_path):
    truth = Library.from_file(str(tiny / "tokenizer.json"))
    made = Text(str(write(tmp_path / "x.gguf", **keys_of(tiny))))
    for one in [*TEXTS, "<|im_start|>user\nHi<|im_end|>"]:
        assert made.tokenizer.encode(one, True) == truth.encode(one).ids
        assert made.tokenizer.decode(truth.encode(one).ids) == one
    assert made.end_tokens == (2, 0) and made.tokenizer.special == {0, 1, 2}
    prompt = made.template.render([{"role": "user", "content": "Hi"}])
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("pre, cuts", [
    ("gpt-2", ["It", "'s", " 1234567", " naïve", " words", "!!", " ", " ok", "\n\n"]),
    ("starcoder", ["It", "'s", " ", *"1234567", " naïve", " words", "!!", " ", " ok", "\n\n"]),
    ("llama-bpe", ["It", "'s", " ", "123", "456", "7", " naïve", " words", "!!", " ", " ok", "\n\n"]),
    ("qwen2", ["It", "'s", " ", *"1234567", " naïve", " words", "!!", " ", " ok", "\n\n"]),
    ("qwen35", ["It", "'s", " ", *"1234567", " naïve", " words", "!!", " ", " ok", "\n\n"]),
    ("tekken", ["It", "'s", " ", *"1234567", " naïve", " words", "!!", " ", " ok", "\n\n"]),
    ("gpt-4o", ["It's", " ", "123", "456", "7", " naïve", " words", "!!", " ", " ok", "\n\n"]),
    ("kimi-k2", ["It's", " ", "123", "456", "7", " naïve", " words", "!!", " ", " ok", "\n\n"]),
    ("deepseek-coder", ["It", "'", "s", *" 1234567", " naïve", " words", "!!", " ", " ok", "\n", "\n"]),
    ("deepseek-llm", ["It", "'", "s", " ", "1234567", " na", "ï", "ve", " words", "!!", " ", " ok", "\n", "\n"]),
    ("deepseek-v3", ["It", "'s", " ", "123", "456", "7", " naïve", " words", "!!", " ", " ok", "\n\n"]),
    ("falcon", ["It", "'", "s", " ", "123", "456", "7", " naïve", " words", "!!", " ", " ok", "\n\n"]),
])  # fmt: skip
def test_how_texts_are_cut(tiny, tmp_path, pre, cuts):
    made, *_ = text.build(write(tmp_path / "x.gguf", **keys_of(tiny, pre=pre)))
    found = made.pre_tokenizer.pre_tokenize_str("It's 1234567 naïve words!!  ok\n\n")
    assert [bytes(ALPHABET[char] for char in one).decode() for one, _ in found] == cuts


@pytest.mark.parametrize("kind", ["llama", "no prefix", "control"])
@pytest.mark.parametrize("type", TYPES)
def test_sentencepiece(tmp_path, type, kind):
    truth = train(tmp_path, **KINDS[kind], **TYPES[type])
    size = range(truth.get_piece_size())
    kinds = {2: truth.is_unknown, 3: truth.is_control, 6: truth.is_byte}
    types = [next((number for number, of in kinds.items() if of(i)), 1) for i in size]
    file = write(
        tmp_path / "x.gguf", model="llama" if type == "bpe" else "t5", tokens=[truth.id_to_piece(i) for i in size],
        scores=[float(truth.get_score(i)) for i in size], bos_token_id=truth.bos_id(), eos_token_id=truth.eos_id(),
        token_type=[4 if truth.id_to_piece(i) == "<|code|>" else one for i, one in zip(size, types, strict=True)],
        unknown_token_id=truth.unk_id(), add_space_prefix=kind != "no prefix", remove_extra_whitespaces=False,
        add_bos_token=True, add_eos_token=False,
    )  # fmt: skip
    made = Tokenizer(tokenizer_file.find(file))
    assert made.size == truth.get_piece_size()
    for one in TEXTS:
        want = truth.encode(one)
        assert made.encode(one, False) == want, one
        assert made.encode(one, True) == [truth.bos_id(), *want]
        assert made.decode(want) == truth.decode(want)


def test_gemma_4(tmp_path):
    """The pairs that SentencePiece merges by scores, as a list."""
    truth = train(tmp_path, **KINDS["no prefix"])
    size = range(truth.get_piece_size())
    kinds = {2: truth.is_unknown, 3: truth.is_control, 6: truth.is_byte}
    types = [next((number for number, of in kinds.items() if of(i)), 1) for i in size]
    tokens = [truth.id_to_piece(i) for i in size]
    plain = sorted((i for i in size if types[i] == 1), key=lambda i: (-truth.get_score(i), i))
    merges = sentencepiece.merges_of({tokens[i]: rank for rank, i in enumerate(plain)})
    file = write(
        tmp_path / "x.gguf", model="gemma4", tokens=tokens, token_type=types, merges=[" ".join(one) for one in merges],
        bos_token_id=truth.bos_id(), unknown_token_id=truth.unk_id(), add_space_prefix=False,
    )  # fmt: skip
    made = Tokenizer(file)
    for one in TEXTS:
        assert made.encode(one, True) == [truth.bos_id(), *truth.encode(one)], one
        assert made.decode(truth.encode(one)) == one


@pytest.mark.parametrize("more, start, end", [
    (dict(), [], []),
    (dict(pre="llama-bpe"), [0], []),
    (dict(pre="llama-bpe", add_bos_token=False, add_eos_token=True), [], [2]),
    (dict(add_bos_token=True), [0], []),
])  # fmt: skip
def test_what_is_put_around_a_text(tiny, tmp_path, more, start, end):
    made = Tokenizer(write(tmp_path / "x.gguf", **keys_of(tiny, bos_token_id=0, **more)))
    assert made.encode("a", True) == [*start, *made.encode("a", False), *end]


def test_ends_and_templates(tiny, tmp_path):
    more = dict(eos_token_id=0, eot_token_id=1)
    templates = {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    made = Text(str(write(tmp_path / "x.gguf", **keys_of(tiny, **more), **templates)))
    assert made.end_tokens == (0, 1, 2)
    assert made.template.render([], tools=[1]) == "[1]"
    made = Text(str(write(tmp_path / "y.gguf", **keys_of(tiny, eos_token_id=0))))
    assert made.end_tokens == (0, 2)  # a control token that ends turns
    keys = keys_of(tiny, eos_token_id=0)
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], "<|return|>", "<|call|>", "<|end|>"]
    keys["tokenizer.ggml.token_type"] = [*keys["tokenizer.ggml.token_type"], 3, 3, 3]
    count = len(keys["tokenizer.ggml.tokens"])
    made = Text(str(write(tmp_path / "z.gguf", **keys)))
    assert made.end_tokens == (0, 2, count - 3, count - 2)  # harmony's <|end|> ends thoughts alone
    more = dict(eos_token_id=0, eot_token_id=count - 1)
    made = Text(str(write(tmp_path / "z.gguf", **(keys | {f"tokenizer.ggml.{name}": id for name, id in more.items()}))))
    assert count - 1 not in made.end_tokens, "whatever the file says"
    keys = {key: value for key, value in keys_of(tiny).items() if key != "tokenizer.chat_template"}
    assert Text(str(write(tmp_path / "z.gguf", **keys))).template.family.family == "ChatML"


@pytest.mark.parametrize("change, words", [
    (dict(tokens=None), "has no tokenizer: tokenizer.ggml.tokens is missing"),
    (dict(model="bert"), "the kind 'bert'; gpt2, gemma4"),
    (dict(pre="viking"), "has the pre-tokenizer 'viking', which is not known; known are chatglm-bpe"),
    (dict(token_type=[1, 2]), "tokens, but the types of 2"),
    (dict(model="llama", scores=[0.5]), "tokens, but the scores of 1"),
    (dict(merges=["no such"]), "the tokenizer in .* is damaged"),
    (dict(add_bos_token="yes"), "tokenizer.ggml.add_bos_token is 'yes'"),
    (dict(merges=[1, 2]), "tokenizer.ggml.merges holds something else than str"),
])  # fmt: skip
def test_what_is_said_of_a_damaged_one(tiny, tmp_path, change, words):
    keys = keys_of(tiny) | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    file = write(tmp_path / "x.gguf", **keys)
    with pytest.raises(ValueError, match=words) as wrong:
        Text(str(file))
    assert str(file) in str(wrong.value)


def test_a_damaged_template(tiny, tmp_path):
    file = write(tmp_path / "x.gguf", **keys_of(tiny) | {"tokenizer.chat_template": "{% if %}"})
    with pytest.raises(ValueError, match=f"template.*{file}.*line 1"):
        Text(str(file))


def test_an_unknown_way_is_told(tiny, tmp_path, caplog):
    Text(str(write(tmp_path / "x.gguf", **keys_of(tiny, pre=None))))
    assert "tokenizer cuts texts: GPT-2's" in caplog.text


def test_thousands_of_added_tokens_take_no_longer_than_their_number(tiny, tmp_path):
    """Gemma's vocabulary has more than six thousand. Given to the library one by one they took seconds."""

    def seconds(count):
        keys = keys_of(tiny)
        size = len(keys["tokenizer.ggml.tokens"])
        keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], *(f"<unused{i}>" for i in range(count))]
        keys["tokenizer.ggml.token_type"] = [*keys["tokenizer.ggml.token_type"], *[3] * count]
        file = write(tmp_path / f"{count}.gguf", **keys)
        start = time.process_time()
        made = Text(str(file))
        taken = time.process_time() - start
        assert made.tokenizer.encode(f"a<unused{count - 1}>", False)[-1] == size + count - 1
        assert made.tokenizer.encode(made.marker.mark(f"a<unused{count - 1}>"), False)[-1] < size
        return taken

    few, many = seconds(500), seconds(6000)
    assert many < 40 * few, (few, many)
