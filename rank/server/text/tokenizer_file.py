"""The file of a model directory that holds its tokenizer, in whichever format, read into one of `tokenizers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, processors

from ... import untrusted_files
from ...checkpoint_files import is_gguf
from . import gguf, sentencepiece, tekken, tiktoken
from .model_files import read_json

NAMES = ("tokenizer.json", tekken.NAME, "tokenizer.model")  # in this order, where there are several
# The tokens that the code of ChatGLM2 and 3, and GLM-4's, puts behind those of tokenizer.model, by tokenizer_class.
CHATGLM = {
    "ChatGLMTokenizer": (
        "[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    ),
    "ChatGLM4Tokenizer": (
        "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
        "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    ),
}  # fmt: skip


def find(directory: Path) -> Path:
    """directory: or a GGUF file, which has its own. Raises FileNotFoundError where the directory has none."""
    if is_gguf(directory):
        return directory
    found = next((directory / name for name in NAMES if (directory / name).is_file()), None)
    if found is None:
        raise FileNotFoundError(
            f"{directory} has no {', '.join(NAMES[:-1])} or {NAMES[-1]}: bring the model's tokenizer, or convert it to "
            "a tokenizer.json, for example with transformers' AutoTokenizer(…).save_pretrained()"
        )
    return found


def load(path: Path, alphabet: dict[str, int]) -> tokenizers.Tokenizer:
    """alphabet: the byte of each character of byte-level BPE. Raises ValueError where the file cannot be read so."""
    if path.name == tekken.NAME:
        made = tekken.build(path, alphabet)
        _surround(made, [tekken.ENDS["bos_token"]], [])
    elif is_gguf(path):
        made, start, end = gguf.build(path)
        _surround(made, start, end)
    elif path.suffix == ".model":
        made = _model_file(path, alphabet)
    else:
        data = untrusted_files.read_bytes(path.parent, path.name)
        try:
            made = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # it raises no other kind
            raise ValueError(f"{path} is no tokenizer that can be read: {error}") from None
    return made


def without(made: tokenizers.Tokenizer, size: int) -> tokenizers.Tokenizer:
    """The tokenizer without the tokens from number `size` on: texts that spell them are made of other tokens."""
    data = json.loads(made.to_str())
    data["added_tokens"] = [one for one in data["added_tokens"] if one["id"] < size]
    model = data["model"]
    if isinstance(model["vocab"], list):
        model["vocab"] = model["vocab"][:size]
    else:
        model["vocab"] = vocab = {token: id for token, id in model["vocab"].items() if id < size}
        if "merges" in model:
            prefix = model.get("continuing_subword_prefix") or ""
            model["merges"] = [
                [left, right]
                for left, right in model["merges"]
                if left in vocab and right in vocab and left + right.removeprefix(prefix) in vocab
            ]
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def without_vocabulary(made: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer's steps with an empty vocabulary and its added tokens: little to write as JSON."""
    bare = tokenizers.Tokenizer(models.BPE())
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (step := getattr(made, name)) is not None:
            setattr(bare, name, step)
    bare.add_tokens(list(made.get_added_tokens_decoder().values()))
    return bare


def _model_file(path: Path, alphabet: dict[str, int]) -> tokenizers.Tokenizer:
    """tokenizer.model, of sentencepiece or in tiktoken's format."""
    config = read_json(path.parent, "tokenizer_config.json")
    kind = str(config.get("tokenizer_class") or "")
    if tiktoken.is_one(path):
        made = tiktoken.build(path, kind, alphabet)
    else:
        made = sentencepiece.build(sentencepiece.read(path), config)
    added = _added(path.parent, config)
    start, end = _end(config, "bos", True, "<s>"), _end(config, "eos", False, "</s>")
    if names := CHATGLM.get(kind):
        added = dict(enumerate(map(_chatglm, names), made.get_vocab_size())) | added
        start = ["[gMASK]", "sop" if "sop" in names else "<sop>"]
    listed = sorted(added.items())
    made.add_tokens([token for _, token in listed])
    for id, token in listed:
        if made.token_to_id(token.content) != id:
            raise ValueError(
                f"{path.parent}: its added tokens say that {token.content!r} is token {id}, but with {path.name} it is "
                f"{made.token_to_id(token.content)}: convert the tokenizer to a tokenizer.json"
            )
    _surround(made, start, end)
    return made


def _chatglm(name: str) -> AddedToken:
    """sop is no part of a word such as sophisticated."""
    return AddedToken(name, special=True, normalized=False, single_word=name.isalpha())


def _end(config: dict[str, Any], name: str, wanted: bool, usual: str) -> list[str]:
    """The token at the start or the end of a text, where tokenizer_config.json asks for it."""
    token = config.get(f"{name}_token") or usual
    return [token["content"] if isinstance(token, dict) else token] if config.get(f"add_{name}_token", wanted) else []


def _surround(made: tokenizers.Tokenizer, start: list[str], end: list[str]) -> None:
    """Let encoding put these tokens around a text, as far as there are such tokens."""
    ids = {token: id for token in (*start, *end) if (id := made.token_to_id(token)) is not None}
    start, end = ([token for token in tokens if token in ids] for tokens in (start, end))
    if ids:
        made.post_processor = processors.TemplateProcessing(
            single=[*start, "$A", *end], special_tokens=list(ids.items())
        )


def _added(directory: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Tokens that transformers' files have in addition to the model's own, by id."""
    plain = read_json(directory, "added_tokens.json")
    found = {int(id): AddedToken(text, special=True, normalized=False) for text, id in plain.items()}
    for id, one in (config.get("added_tokens_decoder") or {}).items():
        ways = {key: bool(one.get(key)) for key in ("special", "lstrip", "rstrip", "normalized", "single_word")}
        found[int(id)] = AddedToken(one["content"], **ways)
    return found
