"""Models that take images from GGUF files with a mmproj file, against transformers' of the checkpoints they are of."""

import functools
import json

import numpy as np
import pytest
import torch
from phalanx import errors
from phalanx.comm import mesh, threads
from phalanx.rank import vision
from phalanx.rank.gguf import checkpoint, header
from phalanx.rank.model import fingerprint, measure
from phalanx.rank.model.config import read_config
from phalanx.rank.model.load import load
from phalanx.rank.model.weights.local_copy import make_local_copy
from phalanx.rank.server.config import ServerConfig
from phalanx.rank.server.text_engine import model_config

from .... import gguf_files, mmproj_files
from ....server import Server
from ..harness import distance, reference
from ..hybrids import HYBRIDS
from ..shapes import MODELS, TEMPERATURE
from ..test_architectures import TOLERANCE, write
from .seeing import PREPROCESSOR, SIZES, add_text, data_url, picture, resized, rules_of, seen_logits
from .test_towers import of_images

VOCAB = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(520)]}
for token, text in ((512, "<|image_pad|>"), (513, "[IMG_BREAK]"), (514, "[IMG_END]"), (515, "[IMG]")):
    VOCAB["tokenizer.ggml.tokens"][token] = text
VOCABULARIES = {"gemma3": {"tokenizer.ggml.tokens": [*VOCAB["tokenizer.ggml.tokens"]]}}
VOCABULARIES["gemma3"]["tokenizer.ggml.tokens"][512] = "<image_soft_token>"
# Files of Mistral do not have its window.
SLIDING = dict(num_hidden_layers=7, layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"])
SHAPES = {name: (MODELS | HYBRIDS)[name] for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")} | {
    "qwen3_vl_moe": MODELS["qwen3_vl_moe"] | {
        "text_config": MODELS["qwen3_vl_moe"]["text_config"] | {"decoder_sparse_step": 1},
    },
    "gemma3": MODELS["gemma3"] | {
        "text_config": MODELS["gemma3"]["text_config"] | {"query_pre_attn_scalar": 16} | SLIDING,
        "vision_config": MODELS["gemma3"]["vision_config"] | {"intermediate_size": 64},
    },
    "mistral3": MODELS["mistral3"] | {
        "image_token_index": 515, "text_config": MODELS["mistral3"]["text_config"] | {"sliding_window": None},
    },
    "mistral3 of mistral4": MODELS["mistral3 of mistral4"] | {
        "image_token_index": 515, "text_config": MODELS["mistral3 of mistral4"]["text_config"] | {
            "rope_parameters": TEMPERATURE | {"llama_4_scaling_beta": 0.1},
        },
    },
}  # fmt: skip

LIMITS = {  # as published: files have none
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5"), {"size": {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}}
    ),
    "gemma3": {"do_pan_and_scan": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> its checkpoint and its file, which has its mmproj file beside it."""

    @functools.cache
    def make(name, kind="F32"):
        folder = tmp_path_factory.mktemp("model")
        path = write(folder / "plain", **SHAPES[name])
        (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR[name] | LIMITS.get(name, {})))
        file, mmproj = mmproj_files.write(path, folder / "files", kind, VOCABULARIES.get(name, VOCAB))
        checkpoint.pair(file, mmproj)
        return path, file

    return make


@pytest.mark.parametrize("name", SHAPES)
def test_config(made, name):
    path, file = made(name)
    want, got = read_config(path), read_config(file)
    assert (got.model_type, got.hidden_size, got.num_layers) == (want.model_type, want.hidden_size, want.num_layers)
    rules = rules_of(file)
    assert rules.token == want.original.get("image_token_id", want.original.get("image_token_index"))
    assert rules.patch == want.original["vision_config"]["patch_size"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tp", [1, 2])
def test_logits_of_several_images(made, name, tp):
    path, file = made(name)
    images = [picture(*size, seed) for seed, size in enumerate(SIZES[:2])]
    ids, got = seen_logits(file, images, tp)
    given = torch.tensor([ids])
    with torch.no_grad():
        want = reference(path)(given, **of_images(path, given, images)).logits[0]
    assert distance(got, want) < TOLERANCE
    assert np.isfinite(want.numpy()).all() and want.std() > 0.5


def test_towers_are_measured(made):
    """Without memory, as with ranks that load them; a model without its file has none."""
    _, file = made("qwen2_5_vl")
    question = {
        "model": str(file), "device": "cpu", "dtype": "f32", "isq": "none", "kv_cache_dtype": "auto", "tp": 1, "pp": 1,
        "most": 1, "context": 512, "mmproj": str(checkpoint.mmproj(file)), "speculate": "none", "draft_model": "",
        "num_speculative_tokens": 0,
    }  # fmt: skip
    tower, bytes_of = threads.run(lambda comm: load(file, mesh.build(comm, 1, 1)).vision, 1)[0], []
    for given in (question, question | {"mmproj": ""}, question):  # the last pairs them again
        ends = measure.measure(given)["ranks"][1]["ends"]["whole"]
        bytes_of.append(sum(one["bytes"] for one in ends if one["name"].startswith("vision.")))
    assert bytes_of[:2] == [sum(x.nbytes for x in tower.parameters()), 0]


def test_quantised_towers(made):
    """Features of a tower in Q8_0 are near to the plain one's, as far as its linears have groups of 32 inputs."""
    _, file = made("qwen2_5_vl")
    _, quantised = made("qwen2_5_vl", "Q8_0")
    image = picture(100, 75)

    def seen(file):
        return threads.run(lambda comm: load(file, mesh.build(comm, 1, 1)).vision(resized(rules_of(file), image)), 1)[0]

    with torch.no_grad():
        plain, near = seen(file), seen(quantised)
    types = read_config(quantised).quantization["types"]
    assert any(name.startswith("vision.") for name in types)
    assert 0 < distance(near, plain) < 0.1


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_names_of_early_files(made, tmp_path, name):
    """Two linears of the tower's MLPs were called by each other's names."""
    path, file = made(name)
    _, mmproj = mmproj_files.write(path, tmp_path / "files", tokenizer=VOCABULARIES.get(name, VOCAB), swapped=True)
    copy = tmp_path / "model.gguf"
    copy.symlink_to(file)
    checkpoint.pair(copy, mmproj)
    ours, theirs = checkpoint.read_index(file), checkpoint.read_index(copy)
    shapes = [
        {name: entry.shape for entries in index.headers.values() for name, entry in entries.items()}
        for index in (ours, theirs)
    ]
    assert shapes[0] == shapes[1] and any(name.endswith(".mlp.fc1.weight") for name in shapes[0])


def test_a_staged_model_has_its_tower(made, tmp_path):
    _, file = made("qwen3_vl")
    copy, _ = make_local_copy(file, tmp_path / "stage")
    assert copy.parent != file.parent and checkpoint.mmproj(copy) == checkpoint.mmproj(file)
    assert fingerprint.take(copy, True).files.keys() == {copy.name, str(checkpoint.mmproj(file))}
    image = picture(100, 75)
    both = [
        threads.run(
            lambda comm, path=path: load(path, mesh.build(comm, 1, 1)).vision(resized(rules_of(path), image)), 1
        )
        for path in (file, copy)
    ]
    assert torch.equal(both[0][0], both[1][0])


def test_a_file_with_and_without_its_tower(made, tmp_path):
    """Two models of one server, whose requests are read in turn."""
    _, file = made("qwen2_5_vl")
    copy = tmp_path / "model.gguf"
    copy.symlink_to(file)
    mmproj = str(checkpoint.mmproj(file))
    seeing, blind = (ServerConfig(model_dir=str(copy), mmproj=one, link="", listen_fd=-1) for one in (mmproj, ""))
    for _ in range(2):
        assert vision.find(copy, model_config(seeing)) is not None and vision.find(copy, model_config(blind)) is None


def test_files_that_do_not_fit(made, tmp_path):
    _, file = made("qwen2_5_vl")
    _, other = made("mistral3")
    copy = tmp_path / "model.gguf"
    copy.symlink_to(file)
    for wrong, why in ((file, "no mmproj file"), (checkpoint.mmproj(other), "is for mistral")):
        checkpoint.pair(copy, wrong)
        with pytest.raises(errors.FatalError, match=why) as stop:
            read_config(copy)
        assert stop.value.code == errors.MODEL
    checkpoint.pair(copy, "")
    assert read_config(copy).model_type == "qwen2"


def test_a_missing_tensor_by_the_files_name(made, tmp_path):
    _, file = made("qwen3_vl")
    mmproj, copy = tmp_path / "mmproj.gguf", tmp_path / "model.gguf"
    copy.symlink_to(file)
    written = checkpoint.mmproj(file).read_bytes()
    mmproj.write_bytes(written.replace(b"v.deepstack.1.fc2.bias", b"v.deepstack.1.fc9.bias"))
    checkpoint.pair(copy, mmproj)
    with pytest.raises(errors.FatalError, match=r"v\.deepstack\.1\.fc2\.bias"):
        threads.run(lambda comm: load(copy, mesh.build(comm, 1, 1)), 1)


def test_two_names_of_one_tensor(made, monkeypatch):
    _, file = made("gemma3")
    name = "vision.projector.mm_input_projection_weight"

    def read(path):
        found = header.read(path)
        given = found.tensors.get("mm.input_projection.weight")
        return found._replace(tensors=found.tensors | ({name: given} if given else {}))

    assert name in checkpoint.read_index(file).files
    monkeypatch.setattr(checkpoint, "read", read)
    with pytest.raises(errors.FatalError, match=name) as stop:
        checkpoint.read_index(file)
    assert stop.value.code == errors.MODEL


@pytest.mark.long
@pytest.mark.timeout(120)
def test_greedy_texts_on_a_live_server(made, tmp_path):
    """--mmproj, with the file in another directory."""
    path, _ = made("qwen2_5_vl")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text((path / "config.json").read_text())
    tokenizer = add_text(tmp_path / "text")
    file, mmproj = mmproj_files.write(path, tmp_path / "files", "F16", gguf_files.tokenizer(tokenizer))
    other = tmp_path / "elsewhere" / "tower.gguf"
    other.parent.mkdir()
    mmproj.rename(other)
    image = picture(100, 75)
    content = [{"type": "image_url", "image_url": {"url": data_url(image)}}, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 20}
    options = "--np", "2", "--tp", "2", "--device", "cpu", "--mem", "64", "--mmproj", str(other)
    with Server(str(file), *options) as server:
        fields = {"ignore_eos": True, "return_token_ids": True}
        status, answer, _ = server.request("/v1/chat/completions", body | fields)
    assert status == 200, answer
    prompt, tokens = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    given = torch.tensor([prompt])
    with torch.no_grad():
        shown = of_images(path, given, [image])
        want = reference(path).generate(given, **shown, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert prompt.count(512) == 12 and tokens == want[0, len(prompt) :].tolist()
