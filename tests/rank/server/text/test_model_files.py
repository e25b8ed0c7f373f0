"""Wrong values in the files of a model directory: found when it is loaded, with the file and the key."""

import json

import pytest
from phalanx import errors
from phalanx.rank.server.config import SamplingDefaults
from phalanx.rank.server.sampling_params import resolve_defaults
from phalanx.rank.server.text.load import Text
from phalanx.rank.server.text.model_files import read_json

from ..conftest import make_model

pytestmark = pytest.mark.timeout(60)
WRONG = [  # file, key, value
    ("generation_config.json", "top_k", 50.0),
    ("generation_config.json", "top_k", -2),
    ("generation_config.json", "top_k", 1 << 40),
    ("generation_config.json", "temperature", "0.5"),
    ("generation_config.json", "temperature", -0.1),
    ("generation_config.json", "temperature", float("nan")),
    ("generation_config.json", "temperature", True),
    ("generation_config.json", "top_p", 1.5),
    ("generation_config.json", "min_p", [0.1]),
    ("generation_config.json", "repetition_penalty", 0.0),
    ("generation_config.json", "repetition_penalty", float("inf")),
    ("generation_config.json", "max_new_tokens", -1),
    ("generation_config.json", "max_new_tokens", 0),
    ("generation_config.json", "eos_token_id", [2, None]),
    ("generation_config.json", "eos_token_id", "2"),
    ("generation_config.json", "eos_token_id", -1),
    ("generation_config.json", "eos_token_id", 2.0),
    ("config.json", "eos_token_id", {"id": 2}),
    ("config.json", "model_type", 7),
    ("config.json", "text_config", [1]),
    ("config.json", "text_config", {"eos_token_id": "x"}),
    ("tokenizer_config.json", "chat_template", 7),
    ("tokenizer_config.json", "chat_template", [{"name": "default"}]),
    ("tokenizer_config.json", "eos_token", 7),
    ("tokenizer_config.json", "eos_token", {"id": 7}),
    ("tokenizer_config.json", "tokenizer_class", 7),
    ("tokenizer_config.json", "added_tokens_decoder", {"x": {"content": "a"}}),
    ("tokenizer_config.json", "add_bos_token", "yes"),
    ("chat_template.json", "chat_template", None),
    ("chat_template.json", "chat_template", 7),
]


def changed(directory, name, change):
    file = directory / name
    raw = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**raw, **change}))
    return directory


def loaded(directory):
    text = Text(str(directory))
    return resolve_defaults(SamplingDefaults(), text.generation)


@pytest.mark.parametrize("name, key, value", WRONG)
def test_a_wrong_value_is_found_at_the_start(tmp_path, name, key, value):
    directory = changed(make_model(tmp_path / "m"), name, {key: value})
    with pytest.raises(errors.FatalError) as error:
        loaded(directory)
    assert error.value.code == errors.MODEL and name in str(error.value) and key in str(error.value)


def test_ids_of_added_tokens(tmp_path):
    (tmp_path / "added_tokens.json").write_text('{"<a>": "7"}')
    with pytest.raises(errors.FatalError, match="added_tokens.json"):
        read_json(tmp_path, "added_tokens.json")


@pytest.mark.parametrize("key, value, limit", [
    ("top_p", 1.5, "1"), ("top_k", -2, "-1"), ("max_new_tokens", 0, "1"), ("repetition_penalty", 0.0, "0.01"),
])  # fmt: skip
def test_the_range_is_told(tmp_path, key, value, limit):
    with pytest.raises(errors.FatalError, match=rf"{key} is {value}.*{limit}"):
        loaded(changed(make_model(tmp_path / "m"), "generation_config.json", {key: value}))


@pytest.mark.parametrize("name", ["generation_config.json", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"7", b"\xff{}", b"[" * 100_000])
def test_a_file_that_is_no_object(tmp_path, name, content):
    directory = make_model(tmp_path / "m")
    (directory / name).write_bytes(content)
    with pytest.raises(errors.FatalError, match=name) as error:
        loaded(directory)
    assert error.value.code == errors.MODEL


def test_what_published_files_have_is_taken(tmp_path):
    directory = make_model(tmp_path / "m")
    given = {
        "temperature": 1, "top_k": 0, "top_p": 0.95, "min_p": None, "repetition_penalty": 1.05, "max_new_tokens": 2048,
        "eos_token_id": [2, 3], "do_sample": True, "pad_token_id": None, "transformers_version": "4.51.0",
    }  # fmt: skip
    changed(directory, "generation_config.json", given)
    changed(directory, "config.json", {"eos_token_id": None, "text_config": None, "torch_dtype": "bfloat16"})
    defaults = loaded(directory)
    names = ("temperature", "top_k", "top_p", "min_p", "max_tokens")
    assert [defaults[name] for name in names] == [1, 0, 0.95, 0.0, 2048]


def test_defaults_of_sampling_that_are_not_used_do_not_matter(tmp_path):
    directory = changed(make_model(tmp_path / "m"), "generation_config.json", {"top_k": 50.0})
    assert Text(str(directory), generation_config=False).generation == {}
