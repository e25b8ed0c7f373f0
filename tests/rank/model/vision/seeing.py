"""Tiny models that take images, and prompts with images for them and for transformers."""

import base64
import io
import json
from dataclasses import replace

import numpy as np
import torch
from phalanx.comm import mesh, threads
from phalanx.rank import vision
from phalanx.rank.gguf import checkpoint
from phalanx.rank.model.batch import EmbeddingOverride
from phalanx.rank.model.load import load
from phalanx.rank.protocol import Picture
from phalanx.rank.server.text.model_files import read_json
from phalanx.rank.worker import kv_cache
from PIL import Image
from tokenizers import Tokenizer

from ....checkpoints import write_tokenizer
from ..harness import BLOCK, forward, make_batch, moved
from ..hybrids import HYBRIDS
from ..shapes import IMAGE, MODELS
from ..test_architectures import write

PREPROCESSOR = {
    "qwen2_5_vl": dict(
        image_processor_type="Qwen2VLImageProcessor", min_pixels=56 * 56, max_pixels=28 * 28 * 30, patch_size=14,
        merge_size=2, temporal_patch_size=2,
    ),
    "qwen3_5": dict(
        image_processor_type="Qwen2VLImageProcessor", size=dict(shortest_edge=56 * 56, longest_edge=28 * 28 * 30),
        patch_size=14, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
    ),
    "qwen2_vl": dict(
        image_processor_type="Qwen2VLImageProcessor", min_pixels=56 * 56, max_pixels=28 * 28 * 30, patch_size=14,
        merge_size=2, temporal_patch_size=2,
    ),
    "qwen3_vl": dict(
        image_processor_type="Qwen2VLImageProcessor", size=dict(shortest_edge=56 * 56, longest_edge=28 * 28 * 30),
        patch_size=14, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
    ),
    "qwen3_vl_moe": dict(
        image_processor_type="Qwen2VLImageProcessor", size=dict(shortest_edge=56 * 56, longest_edge=28 * 28 * 30),
        patch_size=14, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
    ),
    "gemma3": dict(
        image_processor_type="Gemma3ImageProcessor", size=dict(height=98, width=98), resample=2, image_mean=[0.5] * 3,
        image_std=[0.5] * 3, do_pan_and_scan=True, pan_and_scan_min_crop_size=20, pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.3,
    ),
    "llava": dict(
        image_processor_type="LlavaImageProcessor", size=dict(shortest_edge=42), crop_size=dict(height=42, width=42),
    ),
    "llava of siglip": dict(
        image_processor_type="SiglipImageProcessor", size=dict(height=42, width=42), image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    ),
    "pixtral": dict(
        image_processor_type="PixtralImageProcessor", size=dict(longest_edge=200), patch_size=dict(height=14, width=14),
    ),
    "llava_next": dict(
        image_processor_type="LlavaNextImageProcessor", size=dict(shortest_edge=42),
        crop_size=dict(height=42, width=42), image_grid_pinpoints=[[42, 84], [84, 42], [84, 84], [126, 42], [42, 126]],
    ),
    "idefics3": dict(
        image_processor_type="Idefics3ImageProcessor", size=dict(longest_edge=84), max_image_size=dict(longest_edge=28),
    ),
    "gemma4": dict(image_processor_type="Gemma4ImageProcessor", patch_size=7, max_soft_tokens=70),
    "gemma4 small": dict(image_processor_type="Gemma4ImageProcessor", patch_size=7, max_soft_tokens=70),
    **dict.fromkeys(("mistral3", "mistral3 of mistral4"), dict(
        image_processor_type="PixtralImageProcessor", size=dict(longest_edge=200), patch_size=dict(height=28, width=28),
    )),
}  # fmt: skip
PREPROCESSOR["qwen3_5_moe"] = PREPROCESSOR["qwen3_5"]
SEEING = tuple(PREPROCESSOR)  # of shapes.MODELS
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Special tokens by model_type, of which the first stands for features, and what templates write.
SPECIAL = {
    "idefics3": (["<image>", "<fake_token_around_image>", "<global-img>"], "<image>"),
    "gemma3": (["<image_soft_token>", "<start_of_image>", "<end_of_image>"], "<start_of_image>"),
}
# Widths and heights.
SIZES = (100, 75), (30, 190), (640, 480), (13, 40), (61, 28)


def write_seeing(directory, name):
    """A checkpoint of random weights with its preprocessor's settings."""
    write(directory, **(MODELS | HYBRIDS)[name])
    (directory / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR[name]))
    return directory


def add_text(directory):
    """A tokenizer with the tokens of images, and a template that writes them."""
    kind = json.loads((directory / "config.json").read_text())["model_type"]
    special, written = SPECIAL.get(kind, (["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"], None))
    write_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([f"unused{i}" for i in range(IMAGE - tokenizer.get_vocab_size())])
    tokenizer.add_special_tokens(special)
    assert tokenizer.token_to_id(special[0]) == IMAGE
    tokenizer.save(str(directory / "tokenizer.json"))
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", written) if written else TEMPLATE
    (directory / "chat_template.jinja").write_text(template)
    return directory


def data_url(image, form="PNG"):
    file = io.BytesIO()
    image.save(file, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def picture(width, height, seed=0):
    """An image whose patches differ."""
    noise = np.random.default_rng(seed).integers(0, 256, (-(-height // 7), -(-width // 7), 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def rules_of(path):
    return vision.find(path, checkpoint.config(path) if checkpoint.is_gguf(path) else read_json(path, "config.json"))


def resized(rules, image):
    """Its pixels [height, width, 3] u8 as the model takes them."""
    height, width = rules.size(image.height, image.width)
    return torch.from_numpy(np.array(rules.shown(image, height, width)))


def prompt(rules, images, between=(5, 7, 9), before=(11, 12, 13), read=()):
    """Token ids of texts with images between them, and the images' places. read: tokens that a tower reads beside
    each."""
    ids, pictures = list(before), []
    for image in images:
        size = rules.size(image.height, image.width)
        rows, columns = (len(read), 1) if read else rules.grid(*size)
        own = ([*rules.tokens(rows, columns), 14] * rules.runs(*size))[:-1]
        spans = tuple((len(ids) + first, len(ids) + end) for first, end in rules.spans(own))
        pictures.append(Picture(b"", len(ids), len(own), rows, columns, spans))
        ids += [*own, *between]
    return ids, pictures


def seen_logits(path, images, tp=1, device="cpu", dtype="auto", **texts):
    """Token ids of a prompt with these images, and their logits [tokens, vocab]. texts: those that prompt() takes."""
    rules = rules_of(path)
    ids, pictures = prompt(rules, images, **texts)

    def run(comm):
        grid = mesh.build(comm, tp, 1)
        model = load(path, grid, device, dtype)
        read = [torch.tensor(texts["read"], device=device)] if texts.get("read") else []
        values = torch.cat([model.vision(resized(rules, image).to(device), *read) for image in images])
        blocks = -(-len(ids) // BLOCK)
        caches = kv_cache.allocate(model.cache_specs(), blocks, BLOCK, model.dtype, torch.device(device), 1)
        for tensor in (tensor for layer in caches for tensor in layer):
            tensor.fill_(float("nan"))
        batch = moved(make_batch([(ids, 0, range(blocks))], BLOCK, caches), device)
        at = torch.tensor([i for i, token in enumerate(ids) if token == model.image_token], device=device)
        own, *deeper = values.split(model.hidden_size, 1)
        override = EmbeddingOverride(at, own, torch.stack(deeper, 1) if deeper else None)
        batch = replace(batch, embeddings=override)
        if spans := [span for one in pictures for span in one.spans]:
            batch.reach = torch.arange(len(ids), dtype=torch.int32, device=device)
            for first, end in spans:
                batch.reach[first:end] = end - 1
        if model.image_positions is not None:
            batch.positions = torch.from_numpy(model.image_positions(len(ids), pictures)).to(device)
        return forward(model, grid, batch)

    with torch.no_grad():
        return ids, threads.run(run, tp)[0]
