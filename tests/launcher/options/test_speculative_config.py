"""vLLM's --speculative-config."""

import json

import pytest
from phalanx.launcher.options.option_sources import UsageError, read
from phalanx.rank.options import Options

TOKENS = {"num_speculative_tokens": 3}


def given(config, flag="--speculative-config"):
    return read(Options, [flag, config if isinstance(config, str) else json.dumps(config)], {}).options


@pytest.mark.parametrize(
    ("config", "speculate", "model"),
    [
        (TOKENS, "ngram", ""),
        (TOKENS | {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 2}, "ngram", ""),
        (TOKENS | {"method": "ngram_gpu"}, "ngram", ""),
        (TOKENS | {"method": "suffix", "suffix_decoding_min_token_prob": 0.1}, "ngram", ""),
        (TOKENS | {"method": "mtp"}, "mtp", ""),
        (TOKENS | {"method": "deepseek_mtp"}, "mtp", ""),
        (TOKENS | {"method": "qwen3_next_mtp", "model": "the target again"}, "mtp", ""),
        (TOKENS | {"method": "eagle3", "model": "head"}, "eagle3", "head"),
        (TOKENS | {"method": "eagle3", "model": "head", "draft_tensor_parallel_size": 1}, "eagle3", "head"),
        (TOKENS | {"method": "mtp", "disable_padded_drafter_batch": True, "max_model_len": 4096}, "mtp", ""),
        (TOKENS | {"model": "small"}, "draft", "small"),
        (TOKENS | {"method": "draft_model", "model": "small"}, "draft", "small"),
    ],
)
def test_what_it_says_is_what_options_say(config, speculate, model):
    for flag in ("--speculative-config", "-sc"):
        assert given(config, flag) == Options(speculate=speculate, num_speculative_tokens=3, draft_model=model)


def test_ranks_of_a_smaller_model():
    config = TOKENS | {"model": "small", "draft_tensor_parallel_size": 1}
    assert given(config).draft_tensor_parallel_size == 1


@pytest.mark.parametrize("method, speculate", [("mtp", "mtp"), ("suffix", "ngram")])
def test_how_many_tokens_may_be_left_open(method, speculate):
    assert given({"method": method}) == Options(speculate=speculate)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ("{", "JSON"),
        ("3", "object"),
        ({}, "num_speculative_tokens"),
        (TOKENS | {"method": "medusa"}, "medusa"),
        (TOKENS | {"method": "eagle3"}, "model"),
        (TOKENS | {"quantization": "fp8"}, "quantization"),
        ({"num_speculative_tokens": 99}, "99"),
    ],
)
def test_what_cannot_be_understood_is_an_error(config, word):
    with pytest.raises(UsageError, match=word):
        given(config)
