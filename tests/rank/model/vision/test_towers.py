"""Models that take images, against transformers in f32: sizes, pixels, features and logits."""

import functools

import numpy as np
import pytest
import torch
import transformers
from phalanx.comm import mesh, threads
from phalanx.rank.model.load import load
from phalanx.rank.model.vision._tower import in_rows, normalised
from phalanx.rank.model.vision.qwen2_5_vl import patches

from .. import harness
from ..harness import distance
from ..shapes import IMAGE
from ..test_architectures import TOLERANCE
from .seeing import SEEING, SIZES, picture, resized, rules_of, seen_logits, write_seeing


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> its checkpoint, made once."""
    return functools.cache(lambda name: write_seeing(tmp_path_factory.mktemp("model"), name))


def processed(path, images):
    """Images by transformers' image processor, without torchvision."""
    processor = transformers.AutoImageProcessor.from_pretrained(path, backend="pil")
    return processor(images, return_tensors="pt")


def of_images(path, ids, images):
    """The arguments of transformers' models for images in ids."""
    given = dict(processed(path, images))
    shown = (ids == IMAGE).int()
    if given.pop("num_crops", None) is not None:
        return given | {"token_type_ids": shown}
    given.pop("num_soft_tokens_per_image", None)
    typed = "image_grid_thw" in given or "image_position_ids" in given
    return given | ({"mm_token_type_ids": shown} if typed else {})


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_pixels(made, name, size):
    path, image = made(name), picture(*size)
    rules, theirs = rules_of(path), processed(path, [image])
    pixels = resized(rules, image)
    own, want = normalised(pixels, rules), theirs["pixel_values"]
    if "image_grid_thw" in theirs:  # patches, each of two frames
        rows, columns = rules.grid(*pixels.shape[:2])
        assert theirs["image_grid_thw"].tolist() == [[1, rows * rules.merge, columns * rules.merge]]
        own = patches(pixels, rules).view(rows * columns * rules.merge**2, 3, 1, -1)
        want = want.view(len(own), 3, 2, -1)
        own = own.expand_as(want)
    elif "image_position_ids" in theirs:  # patches from 0 to 1, whose colours stand side by side
        own = in_rows(own, rules.patch).permute(0, 2, 3, 1).flatten(1) / 2 + 0.5
        want = want[0, : len(own)]
    elif want.dim() == 5:  # a square, and below it a grid of squares
        edge, want = want.shape[-1], want[0]
        grid = own[:, edge : own.shape[1] // edge * edge, : own.shape[2] // edge * edge]
        grid = grid.unflatten(2, (-1, edge)).unflatten(1, (-1, edge)).permute(1, 3, 0, 2, 4).flatten(0, 1)
        parts = own[None, :, :edge, :edge], grid
        own = torch.cat(parts[::-1] if "pixel_attention_mask" in theirs else parts)
    elif len(want) > 1:  # squares, which stand one below the other
        want = torch.cat(tuple(want), 1)
    assert distance(own, want.view_as(own)) < 1e-5


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("size", SIZES)
def test_features(made, name, size):
    path, image = made(name), picture(*size)
    model = harness.reference(path)
    with torch.no_grad():
        given = dict(processed(path, [image]))
        given.pop("num_soft_tokens_per_image", None)
        found = model.model.get_image_features(**given)
        deeper = getattr(found, "deepstack_features", None) or ()
        want = torch.cat([torch.cat(tuple(one)) for one in (found.pooler_output, *deeper)], 1)
        (tower,) = threads.run(lambda comm: load(path, mesh.build(comm, 1, 1)).vision, 1)
        pixels = resized(rules_of(path), image)
        got = tower(pixels)
        assert len([*tower.pieces(pixels)]) == tower.depth
    assert want.std() > 0.1
    assert distance(got, want) < TOLERANCE


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("tp", [1, 2])
def test_logits_of_several_images(made, name, tp):
    path, images = made(name), [picture(*size, seed) for seed, size in enumerate(SIZES[:3])]
    ids, got = seen_logits(path, images, tp)
    given = torch.tensor([ids])
    with torch.no_grad():
        want = harness.reference(path)(given, **of_images(path, given, images)).logits[0]
    assert distance(got, want) < TOLERANCE
    assert np.isfinite(want.numpy()).all() and want.std() > 0.5
