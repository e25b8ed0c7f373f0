"""Token ids to text, one by one."""

import json
import random

import pytest
import tokenizers
from phalanx.rank.server.text.tokenizer import ContextDetokenizer, Tokenizer, detokenizer
from tokenizers import decoders, models, pre_tokenizers

pytestmark = pytest.mark.timeout(30)
TEXTS = [
    "hello world",
    "你好，世界",
    "🙂🚀👩‍👩‍👧 family",
    "naïve café\n\n  indented\tline",
    "a<|end|>b<think>c",
    " leading",
]


def spell(tokenizer, ids, skip=frozenset()):
    detok = detokenizer(tokenizer, skip, [])
    return [detok.feed(id) for id in ids] + [detok.finish()]


@pytest.fixture(scope="module")
def byte_level(model_dir):
    return Tokenizer(model_dir / "tokenizer.json")


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level(byte_level, text):
    ids = byte_level.encode(text, False)
    pieces = spell(byte_level, ids)
    assert "".join(pieces) == text == byte_level.decode(ids)
    assert "\ufffd" not in "".join(pieces)


def test_random_ids_as_the_library_decodes_them(byte_level):
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(byte_level.size) for _ in range(20)]
        assert "".join(spell(byte_level, ids)) == byte_level.decode(ids)
        assert "".join(spell(byte_level, ids, byte_level.special)) == byte_level.decode(ids, True)


def test_ids_without_a_token_have_no_text(byte_level):
    assert spell(byte_level, [byte_level.size, 100_000]) == ["", "", ""]


def test_an_unfinished_character_is_replaced_at_the_end(byte_level):
    ids = byte_level.encode("\U0001f98a", False)  # not in the corpus: four bytes
    assert len(ids) > 1
    pieces = spell(byte_level, ids[:-1])
    assert pieces[:-1] == [""] * (len(ids) - 1)
    assert pieces[-1] == "\ufffd"


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """A tokenizer as Llama 2's: U+2581 for spaces, byte tokens, a leading space that decoding the whole text strips."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for token in ["\u2581", *"helowrd", "\u2581h", "\u2581he", "ll", "\u2581hell"]:
        vocab.setdefault(token, len(vocab))
    merges = [("\u2581", "h"), ("\u2581h", "e"), ("l", "l"), ("\u2581he", "ll")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    path = tmp_path_factory.mktemp("sp") / "tokenizer.json"
    tokenizer.save(str(path))
    return Tokenizer(path)


def test_sentencepiece_keeps_the_space_between_prompt_and_answer(sentencepiece):
    prompt, answer = sentencepiece.encode("hello", False), sentencepiece.encode("world 你🙂 hello", False)
    assert "".join(spell(sentencepiece, answer)) == " world 你🙂 hello"
    whole = sentencepiece.decode(prompt + answer)
    assert whole == "hello" + " world 你🙂 hello"


def test_metaspace(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581hello", -1.0), ("\u2581world", -1.0)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.bytewise
    assert "".join(spell(tokenizer, tokenizer.encode("hello world", False))) == " hello world"


def test_wordpiece_reads_tokens_in_context(tmp_path):
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({"[UNK]": 0, "hello": 1, "##s": 2, "world": 3, ",": 4}, unk_token="[UNK]")
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert isinstance(detokenizer(tokenizer, frozenset(), []), ContextDetokenizer)
    assert spell(tokenizer, [1, 2, 4, 3]) == ["hello", "s", ",", " world", ""]


def test_limits_in_the_file_are_ignored(tmp_path, model_dir):
    data = json.loads((model_dir / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert len(Tokenizer(tmp_path / "tokenizer.json").encode("hello " * 50, False)) > 4


def test_alphabet_is_the_library_s():
    from phalanx.rank.server.text.tokenizer import ALPHABET

    assert set(ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet()) and sorted(ALPHABET.values()) == list(range(256))
