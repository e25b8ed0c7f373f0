"""How a model's files say how it takes images, strangers' files first of all."""

import json

import pytest
from phalanx import errors
from phalanx.rank import vision


@pytest.mark.parametrize("kind", sorted({*vision.kinds()} - {*vision.SEEING}))
@pytest.mark.parametrize("processor", [
    {"size": [1, 2]}, {"size": 5}, {"image_mean": 5}, {"image_mean": [1, 2]}, {"image_std": [0, 1, 1]},
    {"image_std": ["a", 1, 1]},
], ids=str)  # fmt: skip
def test_files_that_make_no_sense(tmp_path, kind, processor):
    if kind == "gemma4" and "size" in processor:
        pytest.skip("it does not read it")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(errors.FatalError) as told:
        vision.find(tmp_path, {"model_type": kind, "vision_config": {}})
    assert told.value.code == errors.MODEL and str(tmp_path) in str(told.value)


@pytest.mark.parametrize("config, tokenizer", [
    ({"config": 5}, {}), ({"config": {"vision": {"crop_size": 30}}}, {}), ({}, {"added_tokens": 5}),
    ({"config": {"vision": {"overlap_margin": 14}}}, {}), ({}, {"added_tokens": [{"content": "<|endoftext|>"}]}),
    ({}, {"added_tokens": [{"content": "<|endoftext|>", "id": "a"}]}),
], ids=str)  # fmt: skip
def test_moondream_files_that_make_no_sense(tmp_path, config, tokenizer):
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(errors.FatalError) as told:
        vision.find(tmp_path, {"model_type": "moondream1"} | config)
    assert told.value.code == errors.MODEL and str(tmp_path) in str(told.value)


@pytest.mark.parametrize("kind", vision.kinds())
def test_every_shape_of_an_image(tmp_path, kind):
    """Images keep within the model's pixels and are whole tokens, or are refused with a reason."""
    rules = vision.find(tmp_path, {"model_type": kind, "vision_config": {}})
    largest = rules.grid(*rules.largest(1 << 20))
    for height, width in ((1, 1), (1, 200), (200, 1), (1, 50_000_000), (7000, 7000), (3, 400), (65_500, 700)):
        for most in (0, 512 * 512):
            try:
                size = rules.size(height, width, most)
            except ValueError as error:
                assert max(height, width) > 100 * min(height, width) and "times the shorter" in str(error)
                continue
            rows, columns = rules.grid(*size)
            assert rows > 0 < columns and rows * columns <= 2 * largest[0] * largest[1]
            own = rules.tokens(rows, columns) * rules.runs(*size)
            assert own.count(rules.token) == rows * columns
