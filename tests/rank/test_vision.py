"""How a model's files say how it takes images, strangers' files first of all."""

import itertools
import json
import math

import pytest
from phalanx import errors
from phalanx.rank import vision


@pytest.mark.parametrize("kind", sorted({*vision.kinds()} - {*vision.SEEING}))
@pytest.mark.parametrize("processor", [
    {"size": [1, 2]}, {"size": 5}, {"image_mean": 5}, {"image_mean": [1, 2]}, {"image_std": [0, 1, 1]},
    {"image_std": ["a", 1, 1]}, {"do_resize": False}, {"do_rescale": False}, {"rescale_factor": 1},
    {"do_normalize": False}, {"resample": 0}, {"do_resize": "no"},
], ids=str)  # fmt: skip
def test_files_that_make_no_sense(tmp_path, kind, processor):
    if kind == "gemma4" and not {"size", "do_normalize"}.isdisjoint(processor):
        pytest.skip("it does not read it, or takes it")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(errors.FatalError) as told:
        vision.find(tmp_path, {"model_type": kind, "vision_config": {}})
    assert told.value.code == errors.MODEL and str(tmp_path) in str(told.value)


@pytest.mark.parametrize("kind, config, processor", [
    ("gemma3", {}, '{"image_mean": [1%s, 0, 0]}' % ("0" * 400)),
    ("gemma3", {}, '{"do_pan_and_scan": true, "pan_and_scan_min_ratio_to_activate": 1%s}' % ("0" * 400)),
    ("gemma3", {"vision_config": {"image_size": 1 << 14}}, "{}"),
    ("llava_next", {"vision_config": {"image_size": 10}, "image_grid_pinpoints": [[20, 20]]}, "{}"),
    ("llava_next", {"vision_config": {"image_size": 1 << 16}, "image_grid_pinpoints": [[1 << 20, 1 << 20]]}, "{}"),
    ("llava", {"vision_config": {"image_size": 4}}, "{}"),
    ("llava", {"vision_config": {"image_size": 14, "model_type": "siglip_vision_model"}}, "{}"),
    ("idefics3", {"vision_config": {"image_size": 1 << 12, "patch_size": 1}}, "{}"),
    ("mistral3", {}, '{"size": {"longest_edge": 65536}}'),
    ("qwen3_vl", {"vision_config": {"patch_size": 1}}, '{"max_pixels": 4000000}'),
    ("qwen3_vl", {"vision_config": {"patch_size": 65536, "spatial_merge_size": 65536}}, "{}"),
    ("moondream1", {"config": {"vision": {"crop_size": 4096, "enc_patch_size": 1}}}, "{}"),
    ("moondream1", {"config": {"vision": {"crop_size": 4088, "max_crops": 256}}}, "{}"),
])  # fmt: skip
def test_sizes_that_no_model_has(tmp_path, kind, config, processor):
    (tmp_path / "preprocessor_config.json").write_text(processor)
    with pytest.raises(errors.FatalError) as told:
        vision.find(tmp_path, {"model_type": kind, "vision_config": {}} | config)
    assert told.value.code == errors.MODEL and str(tmp_path) in str(told.value)


@pytest.mark.parametrize("config, tokenizer", [
    ({"config": 5}, {}), ({"config": {"vision": {"crop_size": 30}}}, {}), ({}, {"added_tokens": 5}),
    ({"config": {"vision": {"overlap_margin": 14}}}, {}), ({}, {"added_tokens": [{"content": "<|endoftext|>"}]}),
    ({}, {"added_tokens": [{"content": "<|endoftext|>", "id": "a"}]}),
    ({"config": {"region": {"size_out_dim": 3}}}, {}), ({"config": {"region": {"coord_out_dim": -1}}}, {}),
], ids=str)  # fmt: skip
def test_moondream_files_that_make_no_sense(tmp_path, config, tokenizer):
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(errors.FatalError) as told:
        vision.find(tmp_path, {"model_type": "moondream1"} | config)
    assert told.value.code == errors.MODEL and str(tmp_path) in str(told.value)


def test_moondream_spells_points_and_boxes(tmp_path):
    """The published sizes: 1024 bins of coordinates, and pairs of bins of sizes from 1/1024 to 1."""
    rules = vision.find(tmp_path, {"model_type": "moondream1"})
    points, boxes = (rules.spelling(rules.tasks[task]) for task in ("point", "detect"))
    assert boxes.finish() == "[]"
    text = "".join(points.feed(51200 + token) for token in (512, 0, 1023, 256, 1))
    assert json.loads(text + points.finish()) == [{"x": 0.5, "y": 0}, {"x": 0.999023, "y": 0.25}]
    text = "".join(boxes.feed(51200 + token) for token in (512, 768, 1024 + 1023 * 1024, 7))
    assert json.loads(text + boxes.finish()) == [{"x_min": 0, "y_min": 0.749512, "x_max": 1, "y_max": 0.750488}]


EDGES = 1, 3, 200, 256, 400, 900, 1030, 1820, 7000, 65_500, 50_000_000


@pytest.mark.parametrize("kind, processor", [
    *((kind, {}) for kind in vision.kinds()),
    ("gemma3", {"do_pan_and_scan": True}),
    *(("qwen3_vl", {"min_pixels": least, "max_pixels": 1 << 16}) for least in (1, 1 << 15, 1 << 16)),
], ids=str)  # fmt: skip
def test_every_shape_of_an_image(tmp_path, kind, processor):
    """Images become no larger than the largest that is measured, and whole tokens, or are refused with a reason."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    rules = vision.find(tmp_path, {"model_type": kind, "vision_config": {}})
    largest = rules.largest(1 << 20)
    for height, width, most in itertools.product(EDGES, EDGES, (0, 512 * 512)):
        try:
            size = rules.size(height, width, most)
        except ValueError as error:
            assert max(height, width) > 100 * min(height, width) and "times the shorter" in str(error)
            continue
        rows, columns = rules.grid(*size)
        assert rows > 0 < columns and rows * columns <= math.prod(rules.grid(*largest)), (height, width)
        assert encoded(rules, size) <= encoded(rules, largest), (height, width)
        own = rules.tokens(rows, columns) * rules.runs(*size)
        assert own.count(rules.token) == rows * columns


def encoded(rules, size):
    """The pixels of an image of that size that a tower encodes."""
    return math.prod(rules.parts(*size)[0] if hasattr(rules, "parts") else size)
