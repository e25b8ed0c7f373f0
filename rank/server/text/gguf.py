"""The tokenizer and the chat template in a GGUF file's metadata.

docs/gguf.md of https://github.com/ggml-org/ggml names the keys. A BPE's pre-tokenizer has a name there, which stands
for what the `pre_tokenizer` of the model's own tokenizer.json is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ...gguf import header
from . import sentencepiece
from .sentencepiece import CONTROL, NORMAL, SPACE, USER_DEFINED, Piece

log = logging.getLogger(__name__)

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
MARKS = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|{MARKS}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?|"
    rf"\p{{N}}{{1,3}}|{SLASHES}"
)
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}|{SLASHES}"
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CJK = "[一-龥ࠀ-一가-퟿]+"
# Kimi K2's: runs of Chinese characters are words of their own.
HAN = r"&&[^\p{Han}]]"
KIMI_UPPER, KIMI_LOWER = rf"[{UPPER}{HAN}", rf"[{LOWER}{HAN}"
KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{KIMI_UPPER}*{KIMI_LOWER}+{CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{KIMI_UPPER}+{KIMI_LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}|{REST}"
)

BUILT_IN = r"\p{Lu}?\p{Ll}+|\p{L}|\p{N}|[^\s\p{L}\p{N}]+|\n+| +|\s"  # Phalanx's own model's


def _split(*patterns: str) -> list[Any]:
    pieces = [pre_tokenizers.Split(tokenizers.Regex(one), "isolated") for one in patterns]
    return [*pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _gpt2() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False)]


def _digits() -> list[Any]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


def _falcon() -> list[Any]:
    threes = pre_tokenizers.Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated")
    return [pre_tokenizers.Punctuation("contiguous"), *_gpt2(), pre_tokenizers.Digits(), threes]


# How texts are cut before pairs are merged → the names under which files have it
STEPS: dict[Callable[[], list[Any]], tuple[str, ...]] = {
    _gpt2: ("default", "gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais", "trillion", "granite-docling"),
    _digits: ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
    _falcon: ("falcon",),
    functools.partial(_split, LLAMA3): (
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "dbrx", "smaug-bpe",
        "chatglm-bpe", "glm4",
    ),
    functools.partial(_split, QWEN2): ("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez"),
    functools.partial(_split, QWEN35): ("qwen35",),
    functools.partial(_split, O200K): ("gpt-4o", "llama4", "minimax-m2"),
    functools.partial(_split, TEKKEN): ("tekken",),
    functools.partial(_split, BUILT_IN): ("phalanx",),
    functools.partial(_split, KIMI): ("kimi-k2",),
    functools.partial(_split, r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"): ("deepseek-coder",),
    functools.partial(
        _split, r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK, r"\p{N}+"
    ): ("deepseek-llm",),
    functools.partial(_split, r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK): ("deepseek-v3",),
}  # fmt: skip
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")  # a word that is a token is taken so
COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen", "command-r")  # whose texts are brought into NFC


class _Vocabulary:
    """Raises ValueError where the file has no tokenizer, or a damaged one."""

    def __init__(self, file: Path):
        self.file, self._values = file, header.read(file, texts=True).metadata
        self.kind: str = self.value("model", str, "")
        self.tokens: list[str] = self.array("tokens", str)
        if not self.tokens:
            raise ValueError(f"{file} has no tokenizer: tokenizer.ggml.tokens is missing")
        self.types: list[int] = self.array("token_type", int) or [NORMAL] * len(self.tokens)
        self.pre: str = self.value("pre", str, "default") if self.kind == "gpt2" else ""
        if len(self.types) != len(self.tokens):
            raise ValueError(f"{file} has {len(self.tokens)} tokens, but the types of {len(self.types)}")

    def value(self, name: str, kind: type, default: Any) -> Any:
        value = self._values.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, kind):
            raise ValueError(f"{self.file}: tokenizer.ggml.{name} is {value!r}")
        return value

    def array(self, name: str, kind: type) -> list[Any]:
        found = self.value(name, list, [])
        if not all(issubclass(one, kind) for one in set(map(type, found))):
            raise ValueError(f"{self.file}: tokenizer.ggml.{name} holds something else than {kind.__name__}")
        return found

    def token(self, name: str) -> str | None:
        """The text of the token whose id stands under `name`."""
        id = self.value(f"{name}_token_id", int, -1)
        return self.tokens[id] if 0 <= id < len(self.tokens) else None

    def template(self) -> str | list[dict[str, str]] | None:
        """The chat template, or several by name."""
        key = "tokenizer.chat_template"
        found = {name.removeprefix(f"{key}."): value for name, value in self._values.items() if name.startswith(key)}
        named = {"default" if name == key else name: value for name, value in found.items() if isinstance(value, str)}
        if named.keys() <= {"default"}:
            return named.get("default")
        return [{"name": name, "template": value} for name, value in named.items()]


def documents(file: Path) -> dict[str, dict[str, Any]]:
    """The contents that a model directory's files would have, by their names."""
    return _documents(*header.state(file))


@functools.lru_cache(1)  # each name that is asked for is a question
def _documents(file: Path, size: int, changed: int) -> dict[str, dict[str, Any]]:
    found = _Vocabulary(file)
    special = [found.tokens[i] for i, type in enumerate(found.types) if type in (CONTROL, USER_DEFINED)]
    ends = [found.value(f"{name}_token_id", int, -1) for name in ("eos", "eot", "eom")]
    config = {f"{name}_token": found.token(name) for name in ("bos", "eos")}
    config |= {"pad_token": found.token("padding"), "unk_token": found.token("unknown")}
    return {
        "tokenizer_config.json": config | {"chat_template": found.template()},
        "tokenizer.json": {"added_tokens": [{"content": one} for one in special]},
        "generation_config.json": {"eos_token_id": [id for id in ends if 0 <= id < len(found.tokens)]},
    }


def build(file: Path) -> tuple[tokenizers.Tokenizer, list[str], list[str]]:
    """The tokenizer, and what it puts before and behind a text. Raises ValueError where the file's cannot be read."""
    found = _Vocabulary(file)
    makers = {"gpt2": _byte_level, "gemma4": _gemma4, "llama": _sentencepiece, "t5": _sentencepiece}
    if found.kind not in makers:
        raise ValueError(f"{file} has a tokenizer of the kind {found.kind!r}; {', '.join(makers)} can be read")
    try:
        made = makers[found.kind](found)
    except ValueError:
        raise
    except Exception as error:  # what the library raises has no class of its own
        raise ValueError(f"the tokenizer in {file} is damaged: {error}") from None
    ends: list[list[str]] = []
    first = found.pre in WHOLE_WORDS or found.kind in ("llama", "gemma4")
    for name, usual in (("bos", first), ("eos", found.kind == "t5")):
        wanted, token = found.value(f"add_{name}_token", bool, usual), found.token(name)
        ends.append([token] if wanted and token is not None else [])
    return made, ends[0], ends[1]


def _byte_level(found: _Vocabulary) -> tokenizers.Tokenizer:
    steps = next((make for make, names in STEPS.items() if found.pre in names), None)
    if steps is None:
        known = ", ".join(sorted(name for names in STEPS.values() for name in names))
        raise ValueError(f"{found.file} has the pre-tokenizer {found.pre!r}, which is not known; known are {known}")
    if found.pre == "default":
        log.warning("%s does not say how its tokenizer cuts texts: GPT-2's way is taken", found.file)
    made = tokenizers.Tokenizer(_bpe(found, ignore_merges=found.pre in WHOLE_WORDS))
    if found.pre in COMPOSED:
        made.normalizer = cast(Any, normalizers.NFC())
    made.pre_tokenizer = cast(Any, pre_tokenizers.Sequence(steps()))
    made.decoder = cast(Any, decoders.ByteLevel())
    made.add_tokens(sentencepiece.added_tokens(zip(found.tokens, found.types, strict=True)))
    return made


def _gemma4(found: _Vocabulary) -> tokenizers.Tokenizer:
    """Pairs of characters are merged, spaces among them; what is no token becomes bytes."""
    made = tokenizers.Tokenizer(_bpe(found, byte_fallback=True, fuse_unk=True, unk_token=found.token("unknown")))
    made.normalizer = cast(Any, normalizers.Replace(" ", SPACE))
    made.decoder = cast(
        Any, decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    )
    made.add_tokens(sentencepiece.added_tokens(zip(found.tokens, found.types, strict=True)))
    return made


def _bpe(found: _Vocabulary, **options: Any) -> models.BPE:
    merges: list[tuple[str, str]] = []
    for one in found.array("merges", str):
        at = one.find(" ", 1)  # a pair with a space between
        merges.append((one[:at], one[at + 1 :]))
    return models.BPE(vocab={token: i for i, token in enumerate(found.tokens)}, merges=merges, **options)


def _sentencepiece(found: _Vocabulary) -> tokenizers.Tokenizer:
    scores = found.array("scores", float)
    if len(scores) != len(found.tokens):
        raise ValueError(f"{found.file} has {len(found.tokens)} tokens, but the scores of {len(scores)}")
    pieces = [Piece(*one) for one in zip(found.tokens, scores, found.types, strict=True)]
    model = sentencepiece.Model(
        pieces,
        sentencepiece.BPE if found.kind == "llama" else sentencepiece.UNIGRAM,
        byte_fallback=any(type == sentencepiece.BYTE for type in found.types),
        charsmap=bytes(one & 255 for one in found.array("precompiled_charsmap", int)),
        dummy_prefix=found.value("add_space_prefix", bool, True),
        removes_extra_spaces=found.value("remove_extra_whitespaces", bool, found.kind == "t5"),
    )
    return sentencepiece.build(model, {})
