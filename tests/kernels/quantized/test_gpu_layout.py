"""Stacks for CPUs repacked for GPUs: the same weights to the last bit, by the codec of their new form."""

import pytest
import torch
from phalanx.kernels.cpp import ops
from phalanx.kernels.quantized import affine, e4m3, gpu_layout, mxfp4, packed_gemm, target
from phalanx.kernels.quantized.floats import Floats
from phalanx.kernels.quantized.int8_codes import q5_0, q8_0
from phalanx.kernels.quantized.linear import dequantize
from phalanx.kernels.quantized.stack import stack
from phalanx.kernels.quantized.super_blocks import q2_k, q4_0, q4_1, q4_k, q5_1, q5_k, q6_k

from . import layouts
from .codecs import name_of

needs_compiler = pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")
CODECS = q2_k, q4_0, q4_1, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0, e4m3


@needs_compiler
@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_weights(codec):
    weights = torch.randn(3, 40, 512, generator=torch.Generator().manual_seed(0))
    here = stack(codec, lambda expert: codec.encode(weights[expert]), weights.shape)
    there = gpu_layout.repack_for_gpu(here)
    assert isinstance(there.packed, packed_gemm.Packed) and not isinstance(here.packed, packed_gemm.Packed)
    for expert in range(3):
        assert torch.equal(here.expert(expert, torch.float32), there.expert(expert, torch.float32))


@needs_compiler
@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_packed_for_another_device_than_that_of_the_tensors(codec):
    encoded = codec.encode(torch.randn(48, 512, generator=torch.Generator().manual_seed(0)))
    pack = getattr(codec, "FORMS", (codec.pack,))[0]
    with target.packed_for("cuda"):
        there = pack(*encoded)
        with target.packed_for("cpu"):
            here = pack(*encoded)
        assert type(pack(*encoded)) is type(there)
    made = stack(codec, lambda _: encoded, (1, 48, 512), in_host=True)
    assert type(here) is type(made.packed)
    assert torch.equal(dequantize(here), dequantize(there))
    moved = gpu_layout.repack_for_gpu(made).packed
    assert type(moved) is type(there) and torch.equal(moved.tiles, there.tiles)


@needs_compiler
@pytest.mark.parametrize("group, middle", [(32, True), (64, False), (96, False), (384, True)])
def test_codes_of_4_bits_in_groups(group, middle):
    codes = torch.randint(0, 16, (2, 40, 384), dtype=torch.uint8)
    scales = torch.rand(2, 40, 384 // group).half().float()
    zeros = torch.randint(8 if middle else 0, 9 if middle else 17, scales.shape).short()
    here = stack(affine, lambda expert: (codes[expert], scales[expert], zeros[expert]), codes.shape)
    there = gpu_layout.repack_for_gpu(here)
    assert isinstance(there.packed, packed_gemm.Packed) and not isinstance(here.packed, packed_gemm.Packed)
    assert here.packed.blocks.nbytes * 8 <= 5 * 2 * 48 * 384
    want = ((codes.unflatten(2, (-1, group)) - zeros.unsqueeze(3)) * scales.unsqueeze(3)).flatten(2)
    for one in (here, there):
        assert torch.equal(one.plain(torch.float32), want)


def mxfp4_stack(inputs):
    codes, scales = (torch.randint(0, 255, (2, 40, n), dtype=torch.uint8) for n in (inputs // 2, inputs // 32))
    return codes, scales, stack(mxfp4, lambda expert: (codes[expert], scales[expert]), (2, 40, inputs))


@needs_compiler
def test_mxfp4():
    codes, scales, here = mxfp4_stack(192)
    there = gpu_layout.repack_for_gpu(here)
    made = [layouts.mxfp4(*one).tiles for one in zip(codes, scales, strict=True)]
    assert torch.equal(there.packed.tiles, torch.cat(made))
    assert torch.equal(here.plain(torch.float32), there.plain(torch.float32))


def test_parts_make_the_same_stack_again():
    weights = torch.randn(4, 40, 64)
    for one in (weights, stack(q8_0, lambda e: q8_0.encode(weights[e]), weights.shape), Floats(weights, weights)):
        parts = gpu_layout.parts(one)
        assert all(len(x) == 4 for x in parts.tensors)
        some = parts.of([x[1:3] for x in parts.tensors])
        assert gpu_layout.parts(some).key == parts.key and some.shape == (2, *one.shape[1:])
        if not isinstance(one, torch.Tensor | Floats):
            assert torch.equal(some.expert(1, torch.float32), one.expert(2, torch.float32))
