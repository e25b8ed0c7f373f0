"""How few tokens a text can have: never more than it has."""

import json
import random
import unicodedata

import pytest
from phalanx.launcher import builtin_model
from phalanx.rank.server.text.bound import bound
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

pytestmark = pytest.mark.timeout(60)
WORDS = ["hello", "world", "a", "x", "Ünïcödé", "你好", "世", "🙂", "e\u0301", "\u03b9\u0308\u0301", "\u212a", "\u037e",
         " " * 40, "\U00016d63\U00016d67", "=" * 90, "-" * 7, "12345", "\n\n", "\t", "</s>", "<|end|>  ",
         "\u3000", "▁▁▁▁", "ab" * 50, "b64+/", "\u00a0", "'ll"]  # fmt: skip
CORPUS = ["the quick brown fox ends; ", "=" * 64, " " * 64, "-" * 32, "\u0390\u0390 é K ; ab" * 9, "你好世界 " * 9] * 3


def byte_level(**parts):
    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", lstrip="strips" in parts, rstrip="strips" in parts)])
    if "composes" in parts:
        tokenizer.normalizer = normalizers.NFC()
    if "whole" in parts:  # words and blanks may share a token
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
        tokenizer.train_from_iterator(["ab ab ab ab, the quick brown fox " * 20] * 3, trainer)
    return tokenizer


def sentencepiece(pre_tokenizer=None, **options):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    merges = [("\u2581", "h"), ("\u2581h", "e"), ("l", "l"), ("a", "b"), ("ab", "ab"), ("\u2581", "\u2581"),
              ("\u2581\u2581", "\u2581\u2581"), ("=", "="), ("==", "=="), ("o", "\u2581")]  # fmt: skip
    for pair in merges:
        for token in (*pair, "".join(pair)):
            vocab.setdefault(token, len(vocab))
    tokenizer = Library(models.BPE(vocab, merges, **{"byte_fallback": True, "unk_token": "<unk>", **options}))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if pre_tokenizer:
        tokenizer.normalizer = normalizers.Prepend("x")
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


SHAPES = {
    "byte level": byte_level(),
    "composes": byte_level(composes=True),
    "strips": byte_level(strips=True, composes=True),
    "words together": byte_level(whole=True),
    "sentencepiece": sentencepiece(fuse_unk=True),
    "metaspace": sentencepiece(pre_tokenizers.Metaspace()),
    "built-in model": Library.from_file(str(builtin_model.DIRECTORY / "tokenizer.json")),
}


def bounds_of(tokenizer: Library):
    return bound(tokenizer, json.loads(tokenizer.to_str()))


@pytest.mark.parametrize("shape", SHAPES)
def test_no_text_has_fewer_tokens(shape):
    tokenizer = SHAPES[shape]
    found = bounds_of(tokenizer)
    rng = random.Random(shape)
    texts = ["", *WORDS, *(word * 300 for word in WORDS)]
    texts += ["".join(rng.choice(WORDS) + rng.choice(["", " ", "  "]) for _ in range(60)) for _ in range(300)]
    for text in texts:
        count = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert max(found.fewest(text), found.fewest_words(text, 1e9)) <= count, text


def test_long_runs_say_nothing_about_words():
    found = bounds_of(SHAPES["byte level"])
    assert found.longest > 2 * found.longest_word
    assert found.fewest("x" * 10_000) == 10_000 // found.longest_word
    assert found.fewest(" " * 10_000) == 10_000 // found.longest == 10_000 // 64
    assert found.fewest("hello you, " * 100) == found.fewest_words("hello you, " * 100, 1e9) == 100


def test_a_text_is_read_until_it_has_tokens_enough():
    found = bounds_of(SHAPES["composes"])
    for text in ("hello you, " * 1_000_000, "x" * 10_000_000):
        assert 500 <= found.fewest(text, 500) < 70_000 < found.fewest(text)
    # However it is cut into pieces, which is in front of ASCII only.
    text = "e\u0301 ab\u0301 你好 " * 30_000
    whole = len(SHAPES["composes"].encode(text).ids)
    assert 5_000 <= found.fewest(text) <= whole and found.fewest("你" * 100_000) <= 300_000


def test_nfc_shrinks_no_more_than_is_counted_with():
    """The bound by bytes is 2/7 at most; what ASCII letters take in leaves them a byte and a quarter of the rest."""
    widest, planes = {}, range(0x40000)  # behind them Unicode composes nothing
    for char in map(chr, planes):
        full = unicodedata.normalize("NFD", char) if not 0xD800 <= ord(char) < 0xE000 else ""
        if len(full) == 1:
            widest[full] = max(widest.get(full, 0), len(char.encode()), len(full.encode()))
    for char in map(chr, planes):
        if 0xD800 <= ord(char) < 0xE000 or unicodedata.normalize("NFC", char) != char:
            continue
        first, *rest = unicodedata.normalize("NFD", char)
        size, before = len(char.encode()), [widest[one] for one in rest]
        assert widest[first] + sum(before) <= 3.5 * size
        if rest and first.isascii():
            assert 1 + sum(before) / 4 <= size


def test_where_characters_may_vanish_there_is_no_bound():
    unknown = [
        Library(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        Library(models.Unigram([("<unk>", 0.0)], 0)),
        Library(models.BPE({"a": 0}, [])),
        Library(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True)),
    ]
    drop = [normalizers.NFKC(), normalizers.Strip(), normalizers.Replace("ab", "c"), normalizers.Lowercase()]
    for normalizer in drop:
        unknown.append(byte_level())
        unknown[-1].normalizer = normalizer
    for splitter in (pre_tokenizers.Whitespace(), pre_tokenizers.Split(" ", "removed")):
        unknown.append(byte_level())
        unknown[-1].pre_tokenizer = pre_tokenizers.Sequence([splitter, pre_tokenizers.ByteLevel()])
    for tokenizer in unknown:
        assert bounds_of(tokenizer) is None
    assert bounds_of(Library(models.BPE({"a": 0, "?": 1}, [], unk_token="?"))) is not None
