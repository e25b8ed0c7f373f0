"""Tokenizers written into GGUF files: what is read back encodes as the model's own does."""

import json
import shutil
from pathlib import Path

import pytest
from phalanx.launcher import builtin_model
from phalanx.rank.server.text import gguf_keys, sentencepiece
from phalanx.rank.server.text.load import Text
from tokenizers import Tokenizer, processors

from ....checkpoints import make_checkpoint
from .test_gguf import write
from .test_tokenizer_file import KINDS, TEXTS, train

BUILT_IN = Path(builtin_model.__file__).parent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def same(directory, tmp_path, vocab_size, special=("<|im_start|>user\nHi<|im_end|>",)):
    """The keys, once all that is read of them is as the directory's."""
    keys = gguf_keys.keys(directory, vocab_size)
    one, other = Text(str(directory)), Text(str(write(tmp_path / "x.gguf", **keys)))
    for text in (*TEXTS, *special):
        ids = one.tokenizer.encode(text, True)
        assert other.tokenizer.encode(text, True) == ids
        assert other.tokenizer.decode(ids) == one.tokenizer.decode(ids)
    assert set(one.end_tokens) == set(other.end_tokens) and one.tokenizer.special == other.tokenizer.special
    assert (one.template and one.template.source) == (other.template and other.template.source)
    return keys


@pytest.mark.parametrize("name", ["built-in", "tiny"])
def test_byte_level(tiny, tmp_path, name):
    directory, size = (BUILT_IN, 4032) if name == "built-in" else (tiny, 600)
    keys = same(directory, tmp_path, size)
    assert keys["tokenizer.ggml.pre"] == ("phalanx" if name == "built-in" else "gpt-2")
    assert len(keys["tokenizer.ggml.tokens"]) == len(keys["tokenizer.ggml.token_type"]) == size
    if name == "tiny":
        assert keys["tokenizer.ggml.tokens"][-1] == "[PAD599]" and keys["tokenizer.ggml.token_type"][-1] == 5


def test_what_stands_around_texts(tiny, tmp_path):
    directory = shutil.copytree(tiny, tmp_path / "model")
    made = Tokenizer.from_file(str(directory / "tokenizer.json"))
    made.post_processor = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    made.save(str(directory / "tokenizer.json"))
    keys = same(directory, tmp_path, 512)
    assert keys["tokenizer.ggml.add_bos_token"] and keys["tokenizer.ggml.bos_token_id"] == 0


@pytest.mark.parametrize("converted", [False, True])
def test_sentencepiece(tmp_path, converted):
    """The tokenizer.model, and the tokenizer.json that it was converted to, with merges in place of scores."""
    train(tmp_path, **KINDS["control"])
    if converted:
        made = sentencepiece.build(sentencepiece.read(tmp_path / "tokenizer.model"), {})
        made.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer.model").unlink()
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": not converted}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    keys = same(tmp_path, tmp_path, 600, special=())
    assert keys["tokenizer.ggml.model"] == "llama" and keys["tokenizer.ggml.add_bos_token"] == (not converted)


def test_added_tokens_that_the_model_has_no_rows_for(tiny, tmp_path):
    directory = shutil.copytree(tiny, tmp_path / "model")
    made = Tokenizer.from_file(str(directory / "tokenizer.json"))
    size = made.get_vocab_size()
    made.add_tokens(["<image>"])
    made.save(str(directory / "tokenizer.json"))
    keys = gguf_keys.keys(directory, size)
    assert len(keys["tokenizer.ggml.tokens"]) == len(keys["tokenizer.ggml.token_type"]) == size
    other = Text(str(write(tmp_path / "x.gguf", **keys)))
    words = "an <image> of <|im_end|>"
    assert other.tokenizer.encode(words, False) == Text(str(directory)).within(size).tokenizer.encode(words, False)


def test_what_cannot_be_written(tiny, tmp_path):
    directory = shutil.copytree(tiny, tmp_path / "model")
    data = json.loads((directory / "tokenizer.json").read_text())
    cut = {"type": "Split", "pattern": {"String": "q"}, "behavior": "Isolated", "invert": False}
    (directory / "tokenizer.json").write_text(json.dumps(data | {"pre_tokenizer": cut}))
    with pytest.raises(ValueError, match="cuts texts"):
        gguf_keys.keys(directory, 512)
    with pytest.raises(ValueError, match="512 tokens.*embedding 500"):
        gguf_keys.keys(tiny, 500)
