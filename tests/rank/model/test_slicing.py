"""Which entries of packed codes and of scales a rank reads, and cuts that would part what is stored as one."""

import pytest
import torch
from phalanx import errors
from phalanx.rank.model.shard import Shard, even, whole
from phalanx.rank.model.stored_formats import is_among
from phalanx.rank.model.weights.slicing import (
    Field,
    Ratio,
    ShardedModule,
    Source,
    check_cuts,
    slices,
    stored_shape,
)
from torch import nn

PACKED, GROUPED, WHOLE = Ratio(1, 8), Ratio(1, 128, shared=True), Ratio(1, 0, shared=True)


class Stored(ShardedModule):
    fields = (
        Field("codes", "io", torch.int32, ratios={"i": PACKED}),
        Field("scales", "io", torch.float32, ratios={"i": GROUPED}),
        Field("blocks", "oi", torch.uint8, ratios={"i": Ratio(144, 256)}),
        Field("by_output", "oi", torch.float32, ratios={"o": GROUPED, "i": WHOLE}),
        Field("one", "o", torch.float32, ratios={"o": WHOLE}),
    )

    def __init__(self, inputs, outputs, sources, fields):
        super().__init__()
        self.inputs, self.outputs, self.sources = inputs, outputs, sources
        self.fields = tuple(field for field in self.fields if field.name in fields)
        for field in self.fields:
            setattr(self, field.name, nn.Parameter(torch.empty(stored_shape(self, field)), requires_grad=False))


def read(inputs, outputs, *fields, sources=None):
    """field → (shape in the checkpoint, what is read, where it goes) of each slice."""
    sources = sources or tuple(Source(name) for name in "abc"[: len(outputs)])
    module = Stored(inputs, outputs, sources, fields)
    check_cuts(module)
    return [(part.shape, part.ranges, part.starts) for part in slices(module)], stored_shape(module, module.fields[0])


def test_packed_codes_and_blocks_are_cut_between_groups():
    second = even(1024, 1, 2)
    assert read(second, (whole(48),), "codes") == ([((128, 48), ((64, 128), (0, 48)), (0, 0))], (64, 48))
    assert read(second, (whole(48),), "blocks") == ([((48, 576), ((0, 48), (288, 576)), (0, 0))], (48, 288))


def test_scales_of_a_group_that_two_ranks_share():
    third = Shard(576, 192, 192)  # from the middle of the second group to the end of the third
    assert read(third, (whole(8),), "scales") == ([((5, 8), ((1, 3), (0, 8)), (0, 0))], (2, 8))
    heads = Shard(192, 64, 64), Shard(64, 0, 64)
    found, shape = read(whole(16), heads, "by_output")
    assert found == [((2, 1), ((0, 1), (0, 1)), (0, 0)), ((1, 1), ((0, 1), (0, 1)), (1, 0))] and shape == (2, 1)


def test_outputs_of_one_tensor():
    sources = Source("qkv", 0, 320), Source("qkv", 192, 320)
    found, shape = read(whole(16), (Shard(192, 64, 64), Shard(128, 64, 64)), "by_output", sources=sources)
    assert found == [((3, 1), ((0, 1), (0, 1)), (0, 0)), ((3, 1), ((2, 3), (0, 1)), (1, 0))] and shape == (2, 1)
    found, shape = read(whole(16), (whole(192), whole(128)), "one", sources=sources)
    assert found == [((1,), ((0, 1),), (0,)), ((1,), ((0, 1),), (1,))] and shape == (2,)


def test_padding():
    last = even(320, 2, 3)  # 128, 128 and 64 of 128
    assert read(last, (whole(8),), "codes") == ([((40, 8), ((32, 40), (0, 8)), (0, 0))], (16, 8))
    assert read(last, (whole(8),), "scales") == ([((3, 8), ((2, 3), (0, 8)), (0, 0))], (1, 8))
    assert read(even(64, 3, 3), (whole(8),), "scales")[0] == [((1, 8), ((0, 0), (0, 8)), (0, 0))]
    assert read(last, (whole(8),), "one") == ([((1,), ((0, 1),), (0,))], (1,))


def test_a_cut_within_a_group_is_refused():
    with pytest.raises(errors.FatalError, match="a.blocks.*256 inputs.*384 of 768.*--tp") as stop:
        read(even(768, 0, 2), (whole(8),), "blocks")
    assert stop.value.code == errors.USAGE


def test_names_of_modules_that_stay_plain():
    path = "model.layers.3.mlp.down_proj"
    whole = (path, "mlp", "down_proj", "layers.3.", "model.language_model.layers.3", "re:.*down_proj$")
    for pattern in (*whole, "*.mlp", "layers.*.mlp.*_proj", "mlp*"):
        assert is_among(path, [pattern]), pattern
    for pattern in ("lm_head", "down", "layers.30", "mlp.up_proj", "re:down_proj"):
        assert not is_among(path, [pattern]), pattern
