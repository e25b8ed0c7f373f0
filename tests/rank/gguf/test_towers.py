"""Metadata of mmproj files that make no sense: they are refused with a message, before much is made of them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from phalanx import errors
from phalanx.rank.gguf import towers
from phalanx.rank.gguf.header import Header
from phalanx.rank.gguf.metadata import Metadata

SIZES = dict(
    image_size=560, patch_size=14, embedding_length=64, feed_forward_length=128, block_count=4, window_size=112,
    spatial_merge_size=2, projection_dim=64,
) | {"attention.head_count": 4, "projector.scale_factor": 4}  # fmt: skip


WRONG = {key: (0, -1, 1 << 40, ["a"], [1e400], [True]) for key in SIZES} | {"is_deepstack_layers": (5, [True] * 5)}


def metadata(kind, **changes):
    values = {f"clip.vision.{key}": value for key, value in (SIZES | changes).items()}
    values |= {"general.architecture": "clip", "clip.projector_type": kind}
    # Qwen2-VL's files have their MLP's size in its tensors alone.
    up = {"v.blk.0.ffn_up.weight": SimpleNamespace(shape=(128, 64))}
    return Metadata([Header(Path("mmproj.gguf"), values, up, {})])


@pytest.mark.parametrize("kind", towers.supported())
def test_sizes_that_make_no_sense(kind):
    read = set()
    assert towers.find(metadata(kind)).config(metadata(kind))["vision_config"]
    for key, value in ((key, value) for key, values in WRONG.items() for value in values):
        m = metadata(kind, **{key: value})
        try:
            towers.find(m).config(m)
        except errors.FatalError as stop:
            assert stop.code == errors.MODEL and key in str(stop) and "mmproj.gguf" in str(stop)
            read.add(key)
        else:
            assert key not in read
    needed = {"patch_size", "embedding_length", "feed_forward_length", "block_count", "attention.head_count"}
    assert read >= needed - ({"feed_forward_length"} if kind == "qwen2vl_merger" else set())
