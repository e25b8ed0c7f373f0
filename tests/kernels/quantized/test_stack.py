"""Stacks of experts that are packed apart: some for the device, the others for the host."""

import pytest
import torch
from phalanx.kernels.cpp import ops
from phalanx.kernels.quantized import affine
from phalanx.kernels.quantized.int8_codes import q8_0
from phalanx.kernels.quantized.stack import split_for_host, stack
from phalanx.kernels.quantized.super_blocks import q4_k

from .codecs import name_of


@pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")
@pytest.mark.parametrize("codec", [q4_k, q8_0, affine], ids=name_of)
@pytest.mark.parametrize("first", [0, 1, 3, 4, 7])
def test_parted(codec, first):
    """Also within what is packed at once, and where the first are of another form than all, as of codes of 4 bits."""
    draw, shape = torch.Generator().manual_seed(0), (7, 40, 512)
    if codec is affine:
        zeros = torch.full((7 * 40, 16), 8, dtype=torch.int16)
        zeros[4 * 40 :] = 3
        codes = torch.randint(0, 16, (7 * 40, 512), generator=draw, dtype=torch.uint8)
        each = codes, torch.rand(7 * 40, 16, generator=draw).half().float(), zeros
    else:
        each = codec.encode(torch.randn(7 * 40, 512, generator=draw))

    def encoded(index):
        return [x[index * 3 * 40 : (index + 1) * 3 * 40] for x in each]

    whole = stack(codec, encoded, shape, 3, True)
    mine, others = split_for_host(codec, encoded, shape, 3, True, first)
    assert (mine.shape, others.shape) == ((first, 40, 512), (7 - first, 40, 512))
    for a, b, both in zip(mine.tensors, others.tensors, whole.tensors, strict=True):
        assert torch.equal(torch.cat((a, b)), both) and a.untyped_storage().nbytes() == a.nbytes
    for expert in range(7):
        one = mine.expert(expert, torch.float32) if expert < first else others.expert(expert - first, torch.float32)
        assert torch.equal(one, whole.expert(expert, torch.float32))
