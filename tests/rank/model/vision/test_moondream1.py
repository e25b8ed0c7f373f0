"""Moondream 2 beside a plain torch model of its published definition: transformers has no class for it."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from phalanx import errors
from phalanx.comm import mesh, threads
from phalanx.rank.model.architectures import moondream1
from phalanx.rank.model.config import read_config
from phalanx.rank.model.load import load
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.functional import adaptive_avg_pool2d, gelu, layer_norm, linear, scaled_dot_product_attention

from ....checkpoints import write_tokenizer
from ....server import Server
from ..harness import distance, run_steps, tokens
from ..test_architectures import TOLERANCE
from .seeing import SIZES, data_url, picture, resized, rules_of, seen_logits

ENDS = 3.0  # added to the logit of the token that ends a text, so that objects come to an end
TEXT = dict(dim=96, ff_dim=100, n_layers=3, vocab_size=520, max_context=512, n_heads=6, n_kv_heads=6)
VISION = dict(
    enc_dim=32, enc_patch_size=4, enc_n_layers=2, enc_ff_dim=40, enc_n_heads=4, proj_out_dim=96, crop_size=28,
    max_crops=6, overlap_margin=2, proj_inner_dim=48,
)  # fmt: skip
REGION = dict(dim=96, coord_feat_dim=16, coord_out_dim=64, size_feat_dim=24, size_out_dim=96, inner_dim=40)
SIZES_OF_BOXES = REGION["size_out_dim"] // 2
PARTS = {"text": TEXT, "vision": VISION, "region": REGION}
CONFIG = {"model_type": "moondream1", "torch_dtype": "float32", "config": PARTS}
BEGIN = 0  # <|endoftext|> of checkpoints.write_tokenizer
EDGE = VISION["crop_size"] // VISION["enc_patch_size"]


def make(directory, prefix="model."):
    """A checkpoint of random weights in the published form; returns its tensors without the prefix."""
    generator = torch.Generator().manual_seed(3)
    weights = {}

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    def matrix(name, outputs, inputs, scale=1.0):
        weights[f"{name}.weight"] = random(outputs, inputs) * scale * inputs**-0.5
        weights[f"{name}.bias"] = random(outputs) / 2

    def norm(name, size):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + random(size) / 5, random(size) / 5

    def block(name, size, inner, norms):
        for one in norms:
            norm(f"{name}.{one}", size)
        matrix(f"{name}.attn.qkv", 3 * size, size, 1.5)
        matrix(f"{name}.attn.proj", size, size)
        matrix(f"{name}.mlp.fc1", inner, size)
        matrix(f"{name}.mlp.fc2", size, inner)

    text, vision = TEXT["dim"], VISION["enc_dim"]
    weights["text.wte"] = random(TEXT["vocab_size"], text)
    for i in range(TEXT["n_layers"]):
        block(f"text.blocks.{i}", text, TEXT["ff_dim"], ["ln"])
    norm("text.post_ln", text)
    matrix("text.lm_head", TEXT["vocab_size"], text, 2)
    matrix("vision.patch_emb", vision, 3 * VISION["enc_patch_size"] ** 2)
    weights["vision.pos_emb"] = random(1, EDGE**2, vision)
    for i in range(VISION["enc_n_layers"]):
        block(f"vision.blocks.{i}", vision, VISION["enc_ff_dim"], ["ln1", "ln2"])
    norm("vision.post_ln", vision)
    matrix("vision.proj_mlp.fc1", VISION["proj_inner_dim"], 2 * vision)
    matrix("vision.proj_mlp.fc2", text, VISION["proj_inner_dim"])
    for part, numbers in (("coord", 1), ("size", 2)):
        features = REGION[f"{part}_feat_dim"]
        weights[f"region.{part}_features"] = random(numbers, features // 2)
        matrix(f"region.{part}_encoder", text, features, 2)
        matrix(f"region.{part}_decoder.fc1", REGION["inner_dim"], text)
        matrix(f"region.{part}_decoder.fc2", REGION[f"{part}_out_dim"], REGION["inner_dim"], 3)
    weights["text.lm_head.bias"][BEGIN] += ENDS
    usual = states(tokens(100), None, weights).mean(0)  # beside which what differs between tokens is little
    for part in ("coord", "size"):
        weights[f"region.{part}_decoder.fc1.bias"] = weights[f"region.{part}_decoder.fc1.weight"] @ -usual
    save_file({prefix + name: tensor for name, tensor in weights.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return weights


def named(weights, name):
    return weights[f"{name}.weight"], weights[f"{name}.bias"]


def normed(x, weights, name):
    return layer_norm(x, x.shape[-1:], *named(weights, name))


def fed(x, weights, name):
    return linear(gelu(linear(x, *named(weights, f"{name}.fc1")), approximate="tanh"), *named(weights, f"{name}.fc2"))


def encoded(crops, weights):
    """Features [patches, dim] of each crop [size, size, 3] from 0 to 255."""
    found, patch, heads = [], VISION["enc_patch_size"], VISION["enc_n_heads"]
    for crop in crops:
        x = (torch.from_numpy(crop.copy()).float() / 255 - 0.5) / 0.5
        rows = [
            x[i * patch : (i + 1) * patch, j * patch : (j + 1) * patch].permute(2, 0, 1).flatten()
            for i in range(EDGE)
            for j in range(EDGE)
        ]
        x = linear(torch.stack(rows), *named(weights, "vision.patch_emb")) + weights["vision.pos_emb"][0]
        for i in range(VISION["enc_n_layers"]):
            block = f"vision.blocks.{i}"
            q, k, v = linear(normed(x, weights, f"{block}.ln1"), *named(weights, f"{block}.attn.qkv")).chunk(3, 1)
            q, k, v = (one.unflatten(1, (heads, -1)).transpose(0, 1) for one in (q, k, v))
            seen = scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1).flatten(1)
            x = x + linear(seen, *named(weights, f"{block}.attn.proj"))
            x = x + fed(normed(x, weights, f"{block}.ln2"), weights, f"{block}.mlp")
        found.append(normed(x, weights, "vision.post_ln"))
    return found


def cut(image):
    """The whole image and its overlapping crops, as arrays, and how many rows and columns of these there are."""
    size, border = VISION["crop_size"], 2 * VISION["overlap_margin"] * VISION["enc_patch_size"]
    window, most = size - border, VISION["max_crops"]
    height, width = image.height - border, image.width - border
    if height <= window or width <= window:
        rows, columns = 1, 1
    else:
        rows, columns = math.ceil(height / window), math.ceil(width / window)
        if rows * columns > most:
            ratio = math.sqrt(most / (rows * columns))
            # The published code has more than `most` crops of a strip.
            rows, columns = (min(most, max(1, int(length * ratio))) for length in (rows, columns))
        else:
            rows = max(rows, int(math.sqrt(most * height / width)))
            columns = max(columns, int(math.sqrt(most * width / height)))
            if rows * columns > most:
                rows, columns = (rows, most // rows) if columns > rows else (most // columns, columns)
    large = image.resize((columns * window + border, rows * window + border), Image.Resampling.LANCZOS)
    pixels = np.asarray(large)
    crops = [np.asarray(image.resize((size, size), Image.Resampling.LANCZOS))]
    for i in range(rows):
        for j in range(columns):
            crops.append(pixels[i * window : i * window + size, j * window : j * window + size])
    return crops, rows, columns


def features(image, weights):
    """[EDGE * EDGE, dim] of an image."""
    crops, rows, columns = cut(image)
    whole, *parts = encoded(crops, weights)
    margin = VISION["overlap_margin"]
    lines = []
    for i in range(rows):
        line = []
        for j in range(columns):
            grid = parts[i * columns + j].view(EDGE, EDGE, -1)
            top, left = margin * (i > 0), margin * (j > 0)
            bottom, right = EDGE - margin * (i < rows - 1), EDGE - margin * (j < columns - 1)
            line.append(grid[top:bottom, left:right])
        lines.append(torch.cat(line, 1))
    grid = adaptive_avg_pool2d(torch.cat(lines).permute(2, 0, 1), (EDGE, EDGE)).permute(1, 2, 0).flatten(0, 1)
    return fed(torch.cat((whole, grid), 1), weights, "vision.proj_mlp")


def turned(x):
    """x [T, heads, dim], the first half of each head rotated."""
    half = x.shape[2] // 2
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, half, 2) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., : half // 2], x[..., half // 2 : half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., half:]), 2)


def fourier(x, weights, part):
    angles = 2 * math.pi * torch.tensor(x) @ weights[f"region.{part}_features"]
    return linear(torch.cat((angles.cos(), angles.sin())), *named(weights, f"region.{part}_encoder"))


def extent(size):
    return 2 ** (size / (SIZES_OF_BOXES - 1) * 10 - 10)


def embedded(token, weights):
    beyond, coordinates = token - TEXT["vocab_size"], REGION["coord_out_dim"]
    if beyond < 0:
        return weights["text.wte"][token]
    if beyond < coordinates:
        return fourier([beyond / coordinates], weights, "coord")
    pair = divmod(beyond - coordinates, SIZES_OF_BOXES)
    return fourier([extent(one) for one in pair], weights, "size")


def states(ids, shown, weights):
    """[T, dim] of a prompt, before the last norm. shown: features that stand behind its first token; None: it has no
    image."""
    x = torch.stack([embedded(token, weights) for token in ids])
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    if shown is not None:
        x[1 : 1 + len(shown)] = shown
        mask[: 1 + len(shown), : 1 + len(shown)] = True
    for i in range(TEXT["n_layers"]):
        block = f"text.blocks.{i}"
        h = normed(x, weights, f"{block}.ln")
        q, k, v = linear(h, *named(weights, f"{block}.attn.qkv")).unflatten(1, (3, TEXT["n_heads"], -1)).unbind(1)
        q, k, v = (one.transpose(0, 1)[None] for one in (turned(q), turned(k), v))
        seen = scaled_dot_product_attention(q, k, v, mask)[0].transpose(0, 1).flatten(1)
        x = x + linear(seen, *named(weights, f"{block}.attn.proj")) + fed(h, weights, f"{block}.mlp")
    return x


def logits(ids, shown, weights):
    """[T, vocab], of what `states` takes."""
    return linear(normed(states(ids, shown, weights), weights, "text.post_ln"), *named(weights, "text.lm_head"))


def objects(ids, shown, weights, boxes, most=50):
    """Tokens beyond the vocabulary, and the points or boxes that they say."""
    tokens, found, vocabulary, coordinates = [], [], TEXT["vocab_size"], REGION["coord_out_dim"]
    while len(found) < most and logits(ids + tokens, shown, weights)[-1].argmax() != BEGIN:
        for _ in range(2):
            hidden = states(ids + tokens, shown, weights)[-1]
            tokens.append(vocabulary + int(fed(hidden, weights, "region.coord_decoder").argmax()))
        x, y = ((token - vocabulary) / coordinates for token in tokens[-2:])
        found.append({"x": x, "y": y})
        if boxes:
            hidden = states(ids + tokens, shown, weights)[-1]
            width, height = fed(hidden, weights, "region.size_decoder").view(2, -1).argmax(1).tolist()
            tokens.append(vocabulary + coordinates + width * SIZES_OF_BOXES + height)
            w, h = extent(width), extent(height)
            found[-1] = {"x_min": x - w / 2, "y_min": y - h / 2, "x_max": x + w / 2, "y_max": y + h / 2}
    return tokens, found


def test_logits_of_an_image(made):
    path, weights = made
    image = picture(100, 75)
    for tp in (1, 2):
        ids, got = seen_logits(path, [image], tp, before=(), between=tokens(30))
        assert len(ids) == 1 + EDGE**2 + 30
        with torch.no_grad():
            want = logits(ids, features(image, weights), weights)
        assert distance(got, want) < TOLERANCE
    assert want.std() > 0.5


def as_published(path):
    """Writes a checkpoint whose chats are written as the family's; returns its tokenizer."""
    make(path)
    write_tokenizer(path)
    written = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(written.replace("<|im_", "<|another_"))  # or its chats were ChatML's
    (path / "chat_template.jinja").unlink()
    return Tokenizer.from_file(str(path / "tokenizer.json"))


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks, cut", [
    (2, ("--tp", "2", "--mem", "64")), (2, ("--pp", "2", "--mem", "64")),
    (1, ("--mem", "1", "--max-model-len", "256")),  # sequences are preempted
], ids=str)  # fmt: skip
def test_objects_on_a_live_server(made, tmp_path, ranks, cut):
    """Points and boxes, asked for together."""
    _, weights = made
    tokenizer, image = as_published(tmp_path), picture(100, 75)
    part = {"type": "image_url", "image_url": {"url": data_url(image)}}
    options = "--np", str(ranks), "--device", "cpu", "--max-num-batched-tokens", "60", *cut
    shown = features(image, weights)

    def asked(text, **more):
        content = [part, {"type": "text", "text": text}]
        body = {"messages": [{"role": "user", "content": content}], "return_token_ids": True} | more
        return server.request("/v1/chat/completions", body)

    with Server(str(tmp_path), *options) as server, torch.no_grad(), ThreadPoolExecutor() as pool:
        texts = ["Detect: cat", "detect: dog", "Point: cat", "point:the fox", "Why?"]
        several = list(pool.map(asked, texts))
        assert several.pop()[1]["choices"][0]["message"]["content"][:1] != "["
        for text, (status, answer, _) in zip(texts, several, strict=False):
            assert status == 200, answer
            task, name = text.split(":")
            ids, choice = answer["prompt_token_ids"], answer["choices"][0]
            written = tokenizer.decode(ids[1 + EDGE**2 :], skip_special_tokens=False)
            assert written == f"\n\n{task.capitalize()}: {name.strip()}\n\n"
            chosen, found = objects(ids, shown, weights, task.lower() == "detect")
            assert choice["token_ids"] == chosen and len(found) > 4
            assert (choice["finish_reason"] == "length") is (len(found) == 50)
            said = json.loads(choice["message"]["content"])
            assert [one.keys() for one in said] == [one.keys() for one in found]
            assert [[*one.values()] for one in said] == [pytest.approx([*one.values()], abs=1e-5) for one in found]
        if ranks == 1:  # more choices than the cache has blocks for
            while not server.metric("vllm:num_preemptions_total"):  # none where some end before others begin
                _, answer, _ = asked(texts[3], n=10)
                assert all(one["token_ids"] == chosen for one in answer["choices"])
        status, answer, _ = asked("Detect: cat", max_tokens=5)
        assert len(json.loads(answer["choices"][0]["message"]["content"])) == 1  # the second one is not whole
        for wrong in ({"logprobs": True}, {"response_format": {"type": "json_object"}}):
            status, answer, _ = asked("Detect: cat", **wrong)
            assert status == 400 and answer["error"]["param"] == [*wrong][0]
        body = {"messages": [{"role": "user", "content": "Point: cat"}]}
        status, answer, _ = server.request("/v1/chat/completions", body)
        assert status == 400 and "no image" in answer["error"]["message"]


@pytest.mark.long
@pytest.mark.timeout(120)
def test_greedy_texts_on_a_live_server(made, tmp_path):
    """A question, a caption and a text alone, of two ranks; chunks do not part an image."""
    _, weights = made
    tokenizer = as_published(tmp_path)
    begin, token = tokenizer.token_to_id("<|endoftext|>"), TEXT["vocab_size"] - 1
    shown = picture(100, 75)
    image = {"type": "image_url", "image_url": {"url": data_url(shown)}}
    chats = {"Question: Why?": [image, {"type": "text", "text": "Why?"}], "Caption:": [image], "Question: Who?": "Who?"}
    options = "--np", "2", "--tp", "2", "--device", "cpu", "--mem", "64", "--max-num-batched-tokens", "40"
    with Server(str(tmp_path), *options) as server, torch.no_grad():
        for asked, content in chats.items():
            body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 100}
            body |= {"ignore_eos": True, "return_token_ids": True}
            status, answer, _ = server.request("/v1/chat/completions", body)
            assert status == 200, answer
            ids, found = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
            features_of = None if isinstance(content, str) else features(shown, weights)
            assert ids[0] == begin and ids.count(token) == (0 if features_of is None else EDGE**2)
            assert asked in tokenizer.decode([one for one in ids if one != token], skip_special_tokens=False)
            for one in found:
                assert logits(ids, features_of, weights)[-1].argmax() == one
                ids.append(one)
            assert len(found) == 100
        two = {"messages": [{"role": "user", "content": [image, image]}]}
        status, answer, _ = server.request("/v1/chat/completions", two)
        assert status == 400 and "1 places for the 2 images" in answer["error"]["message"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint, and its tensors."""
    path = tmp_path_factory.mktemp("model")
    return path, make(path)


@pytest.mark.parametrize("cut", [(1, 1), (2, 1), (3, 1), (1, 2)], ids=str)
def test_texts_without_an_image(made, cut):
    path, weights = made
    ids = tokens(60)
    (got,) = run_steps(path, [ids], [[(0, 41)], *[[(0, 1)]] * 19], *cut, max_model_len=512)
    assert distance(got, logits(ids, None, weights)) < TOLERANCE


def test_names_without_a_prefix(made, tmp_path):
    make(tmp_path, "")
    ids = tokens(20)
    assert torch.equal(run_steps(tmp_path, [ids])[0], run_steps(made[0], [ids])[0])


def test_what_config_json_leaves_out(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "moondream1", "config": {}}))
    config = read_config(tmp_path)
    sizes = config.hidden_size, config.num_layers, config.num_heads, config.head_dim, config.vocab_size
    assert sizes == (2048, 24, 32, 64, 51200) and config.max_positions == 2048
    assert rules_of(tmp_path).size(1000, 2000) == (378 + 2 * 266 + 112, 4 * 266 + 112)
    text = {"config": {"text": {"group_size": 128}}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "moondream1"} | text))
    with pytest.raises(errors.FatalError, match="group_size") as stop:
        moondream1.Args.from_config(read_config(tmp_path))
    assert stop.value.code == errors.MODEL


@pytest.mark.parametrize("size", [*SIZES, (90, 90), (300, 40), (45, 46)])
def test_features(made, size):
    path, weights = made
    image = picture(*size)
    rules = rules_of(path)
    assert rules.grid(*rules.size(image.height, image.width)) == (EDGE, EDGE)
    with torch.no_grad():
        want = features(image, weights)
        (got,) = threads.run(lambda comm: load(path, mesh.build(comm, 1, 1)).vision(resized(rules, image)), 1)
    assert want.std() > 0.1
    assert distance(got, want) < TOLERANCE
