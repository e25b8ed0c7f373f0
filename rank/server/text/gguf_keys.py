"""A model directory's tokenizer and chat template as the metadata of a GGUF file: the reverse of gguf.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from ... import untrusted_files
from ..api_error import ApiError
from . import sentencepiece, tokenizer_file
from .gguf import COMPOSED, STEPS, WHOLE_WORDS
from .load import Text
from .model_files import read_json
from .sentencepiece import BPE, BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Piece

# Cut differently by each of STEPS.
PROBE = (
    "I'LL see we've 1234567 x1 naïve Ünïcode—CamelCase HTTPServer a/b/c //path\r\n\n  two   spaces\t\ttabs !!?? $%&'() "
    "日本語 ひらがな हिन्दी café's 3.14159 don't  end \n"
)


def keys_of_text(text: Text, directory: str, vocab_size: int) -> dict[str, Any]:
    """`keys` as a TextProcess runs it. Raises ApiError where a GGUF file cannot hold the tokenizer."""
    try:
        return _keys(text.within(vocab_size), Path(directory), vocab_size)
    except (OSError, ValueError) as error:
        raise ApiError(400, str(error)) from None


def keys(directory: Path, vocab_size: int) -> dict[str, Any]:
    """vocab_size: the embedding's rows, of which the tokenizer may have fewer. Raises ValueError where a GGUF file
    cannot hold the tokenizer, OSError where there is none."""
    return _keys(Text(str(directory)).within(vocab_size), directory, vocab_size)


def _keys(text: Text, directory: Path, vocab_size: int) -> dict[str, Any]:
    file = tokenizer_file.find(directory)
    if file.name not in ("tokenizer.json", "tokenizer.model"):
        raise ValueError(f"{file}: GGUF files of this tokenizer cannot be written: convert it to a tokenizer.json")
    made = tokenizer_file.load(file, {})
    found = _of_json(file, made) if file.suffix == ".json" else _of_model(file, made)
    missing = vocab_size - len(found["tokens"])
    if missing < 0 and not set(found["token_type"][vocab_size:]) & {NORMAL, BYTE}:  # added tokens of other models
        for name in {"tokens", "token_type", "scores"} & found.keys():
            del found[name][vocab_size:]
        missing = 0
    if missing < 0:
        raise ValueError(f"{file} has {len(found['tokens'])} tokens, the model's embedding {vocab_size}")
    found["tokens"] += [f"[PAD{vocab_size - missing + i}]" for i in range(missing)]
    found["token_type"] += [UNUSED] * missing
    if "scores" in found:
        found["scores"] += [-1000.0] * missing
    found |= _ends(directory, text, made)
    template = {"tokenizer.chat_template": text.template.source} if text.template else {}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()} | template


def _ends(directory: Path, text: Text, made: tokenizers.Tokenizer) -> dict[str, Any]:
    """Which tokens begin and end texts, and whether they are put there."""
    config = read_json(directory, "tokenizer_config.json")

    def id_of(name: str) -> int | None:
        token = config.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        return made.token_to_id(token) if token else None

    own = id_of("eos")
    ends = [one for one in (own, *text.end_tokens) if one is not None]
    named: dict[str, int | None] = dict(zip(("eos", "eot", "eom"), dict.fromkeys(ends), strict=False))
    named |= {"bos": id_of("bos"), "padding": id_of("pad"), "unknown": id_of("unk")}
    around, plain = made.encode("a").ids, made.encode("a", add_special_tokens=False).ids
    at = next((i for i in range(len(around)) if around[i : i + len(plain)] == plain), 0)
    found: dict[str, Any] = {f"{name}_token_id": id for name, id in named.items() if id is not None}
    found["add_bos_token"] = at > 0
    found["add_eos_token"] = len(around) > at + len(plain)
    if at > 0:  # what really stands there
        found["bos_token_id"] = around[0]
    return found


def _of_json(file: Path, made: tokenizers.Tokenizer) -> dict[str, Any]:
    data = untrusted_files.read_json(file.parent, file.name)
    model = data["model"]
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"{file} is a tokenizer of the type {model['type']}; GGUF files of BPE can be written")
    added = {one["id"]: one for one in data.get("added_tokens") or ()}
    vocab = {id: token for token, id in model["vocab"].items()} | {id: one["content"] for id, one in added.items()}
    tokens = [vocab.get(id, f"[PAD{id}]") for id in range(max(vocab) + 1)]
    types = [_type(id, vocab, added, model) for id in range(len(tokens))]
    if model.get("byte_fallback"):
        return _pieces(data, tokens, types)
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    return {"model": "gpt2", "pre": _pre(file, made, data), "tokens": tokens, "token_type": types, "merges": merges}


def _type(id: int, vocab: dict[int, str], added: dict[int, Any], model: dict[str, Any]) -> int:
    if id not in vocab:
        return UNUSED
    if id in added:
        if added[id]["content"] == model.get("unk_token"):
            return UNKNOWN
        return CONTROL if added[id].get("special") else USER_DEFINED
    token = vocab[id]
    is_byte = model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return BYTE if is_byte else NORMAL


def _pieces(data: dict[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """A sentencepiece model that was converted: pairs were merged by the score of what becomes of them."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(data["model"]["merges"]):
        # A pair with a space between: pieces have none.
        ranks.setdefault("".join(pair.split(" ") if isinstance(pair, str) else pair), rank)
    worst = float(len(ranks) + len(tokens))
    scores = [
        -float(ranks.get(token, worst)) if type == NORMAL else 0.0 for token, type in zip(tokens, types, strict=True)
    ]
    steps = json.dumps([data.get("normalizer"), data.get("pre_tokenizer")], ensure_ascii=False)
    prefix = '"Prepend"' in steps or '"prepend_scheme": "first"' in steps or '"prepend_scheme": "always"' in steps
    return {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "add_space_prefix": prefix}


def _of_model(file: Path, made: tokenizers.Tokenizer) -> dict[str, Any]:
    model = sentencepiece.read(file)
    if model.kind != BPE:
        raise ValueError(f"{file} is a unigram model; GGUF files of BPE can be written")
    pieces = list(model.pieces)
    for id in range(len(pieces), made.get_vocab_size()):
        pieces.append(Piece(made.id_to_token(id) or "", -1000.0, CONTROL))
    config = read_json(file.parent, "tokenizer_config.json")
    prefix = config.get("add_prefix_space")
    return {
        "model": "llama",
        "tokens": [one.text for one in pieces],
        "token_type": [one.type for one in pieces],
        "scores": [one.score for one in pieces],
        "add_space_prefix": model.dummy_prefix if prefix is None else bool(prefix),
        "remove_extra_whitespaces": model.removes_extra_spaces,
    }


def _pre(file: Path, made: tokenizers.Tokenizer, data: dict[str, Any]) -> str:
    """The name of how texts are cut before pairs are merged. Raises ValueError where it has none."""
    whole = bool(data["model"].get("ignore_merges"))
    composed = "NFC" in json.dumps(data.get("normalizer"))
    cut = made.pre_tokenizer.pre_tokenize_str(PROBE) if made.pre_tokenizer else []
    for make, names in STEPS.items():
        if tokenizers.pre_tokenizers.Sequence(make()).pre_tokenize_str(PROBE) != cut:
            continue
        for name in names[1:] if names[0] == "default" else names:
            if (name in WHOLE_WORDS, name in COMPOSED) == (whole, composed):
                return name
    raise ValueError(f"{file} cuts texts in a way that has no name in GGUF files")
