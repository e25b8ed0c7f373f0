"""`phalanx serve FILE.gguf`: one file is the whole model, and answers as the directory that it was made of."""

import functools

import pytest

from . import gguf_files
from .checkpoints import make_checkpoint
from .rank.reference import Reference
from .server import Server

PROMPT = "The quick brown fox waits for a message"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(model_type):
        sizes = dict(hidden_size=96, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2)
        return make_checkpoint(tmp_path_factory.mktemp(model_type), model_type, seed=2, head_dim=16, **sizes)

    return make


@pytest.mark.parametrize(
    "model_type, ranks, kind, shards",
    [("llama", 1, "Q8_0", 3), pytest.param("qwen3", 2, "BF16", 1, marks=pytest.mark.long)],
)
def test_a_file_is_served(checkpoint, tmp_path, model_type, ranks, kind, shards):
    path = checkpoint(model_type)
    tokenizer = gguf_files.tokenizer(path)
    file = gguf_files.write(path, tmp_path / "tiny.gguf", kind, tokenizer=tokenizer, shards=shards)
    assert file.name == ("tiny.gguf" if shards == 1 else "tiny-00001-of-00003.gguf")
    want = Reference(gguf_files.dequantised(path, tmp_path / "same", kind))
    words = [str(file)] if shards == 1 else ["--f", str(file)]  # the first of them stands for all
    with Server(*words, "--np", str(ranks), "--device", "cpu", "--mem", "64") as server:
        body = dict(prompt=PROMPT, max_tokens=40, temperature=0, return_token_ids=True, ignore_eos=True)
        status, answer, _ = server.request("/v1/completions", body)
        assert status == 200, answer
        ids = server.request("/tokenize", dict(prompt=PROMPT))[1]["tokens"]
        assert answer["choices"][0]["token_ids"] == want.yardstick(ids, 40)
        chat = server.request("/v1/chat/completions", dict(messages=[dict(role="user", content="Hi")], max_tokens=4))[1]
        assert chat["usage"]["prompt_tokens"] > 4 and chat["model"] == "tiny"
