"""Experts made over on a GPU in one pass, beside torch's way."""

import pytest
import torch
from phalanx.kernels.moe import moved_nibbles
from phalanx.kernels.quantized import gpu_form, q2_k, q4_0, q4_k, q6_k, q8_0
from phalanx.kernels.quantized.stack import stack

from ...devices import require_gpu

require_gpu()


@pytest.mark.parametrize("codec", [q2_k, q4_0, q4_k, q6_k, q8_0], ids=lambda one: one.__name__.rpartition(".")[2])
@pytest.mark.parametrize("experts, outputs, inputs", [(1, 16, 256), (5, 40, 512), (9, 768, 2048)])
def test_forms_of_gguf(codec, experts, outputs, inputs):
    weights = torch.randn(1, outputs, inputs, generator=torch.Generator().manual_seed(0))
    one = gpu_form.parts(stack(codec, lambda expert: codec.encode(weights[expert]), weights.shape))

    def make(x):
        return gpu_form.parts(gpu_form.of_gpu(one.of([x]))).tensors[0]

    first = one.tensors[0].cuda()
    given = torch.randint(0, 256, (experts, *first.shape[1:]), dtype=torch.uint8, device="cuda")
    want, moves = make(given), moved_nibbles.find(make, first)
    out = torch.empty_like(want)
    moved_nibbles.move(moves, given, out)
    assert torch.equal(out, want)
