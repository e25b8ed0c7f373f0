"""Experts repacked on a GPU in one pass, beside torch's way."""

import pytest
import torch
from phalanx.kernels.moe import nibble_permutation
from phalanx.kernels.quantized import affine, gpu_layout
from phalanx.kernels.quantized.int8_codes import q8_0
from phalanx.kernels.quantized.stack import stack
from phalanx.kernels.quantized.super_blocks import q2_k, q4_0, q4_k, q5_k, q6_k

from ...devices import require_gpu
from ..quantized.codecs import name_of

require_gpu()


@pytest.mark.parametrize("codec", [q2_k, q4_0, q4_k, q5_k, q6_k, q8_0, affine], ids=name_of)
@pytest.mark.parametrize("experts, outputs, inputs", [(1, 16, 256), (5, 40, 512), (9, 768, 2048)])
def test_forms(codec, experts, outputs, inputs):
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    in_groups = torch.randint(0, 16, weight.shape, dtype=torch.uint8), torch.rand(outputs, inputs // 64).half().float()
    encoded = (
        (*in_groups, torch.randint(0, 16, in_groups[1].shape).short()) if codec is affine else codec.encode(weight)
    )
    one = gpu_layout.parts(stack(codec, lambda _: encoded, (1, outputs, inputs)))

    def make(x):
        return gpu_layout.parts(gpu_layout.repack_for_gpu(one.of([x]))).tensors[0]

    first = one.tensors[0].cuda()
    given = torch.randint(0, 256, (experts, *first.shape[1:]), dtype=torch.uint8, device="cuda")
    want, permutation = make(given), nibble_permutation.find(make, first)
    out = torch.empty_like(want)
    nibble_permutation.permute(permutation, given, out)
    assert torch.equal(out, want)
