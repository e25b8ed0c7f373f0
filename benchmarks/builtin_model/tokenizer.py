"""Train tokenizer.json: byte-level BPE in which a word has the same tokens wherever it stands.

A space is a token of its own (not the start of the next word), numerals stand alone and so do the letters of
an upper-case word. That costs tokens in prose, and makes copying a word from a sentence into JSON a matter of
repeating tokens, which is most of what a model of this size is asked to do.
"""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .template import chat_template

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Not marked special, so that they survive `skip_special_tokens` and parsers see them in the text.
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
PIECES = r"\p{Lu}?\p{Ll}+|\p{L}|\p{N}|[^\s\p{L}\p{N}]+|\n+| +|\s"


def train(texts, vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` entries; the special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL + MARKERS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the texts yield {tokenizer.get_vocab_size()} tokens, not {vocab_size}: give more text")
    return unmark(tokenizer)


def unmark(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with MARKERS no longer special; the trainer knows only special ones."""
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(data))


def tokenizer_config(tokenizer: Tokenizer) -> dict:
    """The files that transformers and the server read in addition to tokenizer.json."""
    added = {
        str(tokenizer.token_to_id(text)): dict(
            content=text, lstrip=False, normalized=False, rstrip=False, single_word=False, special=text in SPECIAL
        )
        for text in SPECIAL + MARKERS
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": chat_template(),
    }


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    text = json.dumps(tokenizer_config(tokenizer), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
