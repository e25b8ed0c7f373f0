"""The tokens that end an answer: all that a model's family has, in both kinds of checkpoint."""

import json

import pytest
from phalanx.rank.server.text.end_tokens import ENDS, family_ends
from phalanx.rank.server.text.load import Text

from ..conftest import make_model
from .test_gguf import write

FAMILIES = {
    "Qwen2.5": (["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_middle|>"], ["<|endoftext|>", "<|im_end|>"]),
    "Llama 3": (
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"],
        ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"],
    ),
    "CodeLlama": (["<s>", "</s>", "<EOT>"], ["<EOT>"]),
    "Kimi K2": (["[BOS]", "[EOS]", "<|im_end|>", "[EOT]"], ["<|im_end|>", "[EOT]", "[EOS]"]),
    "SmolVLM": (["<|im_start|>", "<end_of_utterance>"], ["<end_of_utterance>"]),
    "gpt-oss": (
        ["<|endoftext|>", "<|return|>", "<|call|>", "<|end|>", "<|start|>"],
        ["<|endoftext|>", "<|return|>", "<|call|>"],
    ),
    "Solar": (["<|end|>", "<|flush|>", "<|calls|>"], ["<|flush|>", "<|calls|>"]),
    "Phi-3": (["<|user|>", "<|end|>", "<|endoftext|>", "<|system|>"], ["<|endoftext|>", "<|end|>"]),
    "GLM": (
        ["[gMASK]", "<sop>", "<|user|>", "<|observation|>", "<|endoftext|>"],
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
    ),
    "Gemma 3": (["<eos>", "<end_of_turn>", "</s>", "<table>"], ["<end_of_turn>", "<eos>"]),
    "Gemma 4": (["<eos>", "<turn|>", "<|tool_response>"], ["<turn|>", "<eos>", "<|tool_response>"]),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_of_a_family(family):
    added, ends = FAMILIES[family]
    assert family_ends(added) == ends


def with_tokens(directory, tokens):
    data = json.loads((directory / "tokenizer.json").read_text())
    first = len(data["model"]["vocab"])
    for id, content in enumerate(tokens, first):
        data["added_tokens"].append({**data["added_tokens"][0], "id": id, "content": content, "special": True})
    (directory / "tokenizer.json").write_text(json.dumps(data))
    return {content: id for id, content in enumerate(tokens, first)}


@pytest.mark.parametrize("listed", [[], ["<|im_end|>"], ["<|endoftext|>", "<|im_end|>"]])
def test_a_model_directory_whose_files_name_some(tmp_path, listed):
    directory = make_model(tmp_path / "m")
    ids = with_tokens(directory, ["<|endoftext|>", "<|im_end|>"])
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[one] for one in listed]}))
    text = Text(str(directory))
    assert set(text.end_tokens) == {*ids.values(), text.tokenizer.token_id("<|end|>")}


@pytest.mark.parametrize("named", ["<|endoftext|>", "<|im_end|>"])
def test_a_gguf_file_that_names_one(tmp_path, named):
    tokens = ["a", "b", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    keys = {
        "model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": [1, 1, 3, 3, 3], "merges": [],
        "eos_token_id": tokens.index(named),
    }  # fmt: skip
    text = Text(str(write(tmp_path / "x.gguf", **keys)))
    assert sorted(text.end_tokens) == [2, 4]


def test_no_end_is_named_twice():
    assert len(set(ENDS)) == len(ENDS)
