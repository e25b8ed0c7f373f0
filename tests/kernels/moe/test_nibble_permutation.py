"""Experts for CPUs repacked for GPUs in one pass, beside torch's way."""

import os
import subprocess
import sys

import pytest
import torch
from phalanx.kernels.cpp import ops
from phalanx.kernels.moe import nibble_permutation
from phalanx.kernels.quantized import affine, gpu_layout
from phalanx.kernels.quantized.int8_codes import q8_0
from phalanx.kernels.quantized.stack import stack
from phalanx.kernels.quantized.super_blocks import q2_k, q4_0, q4_k, q5_1, q5_k, q6_k

from ..quantized.codecs import name_of
from ..test_compile import TRITON, Recorder, checked, compile_launch


def test_what_is_found_moves_the_same_nibbles():
    def make(x):  # of each pair of rows of 6 bytes one of 10: nibbles change places, two bytes are there twice
        pairs = x.reshape(*x.shape[:-2], x.shape[-2] // 2, 12)
        swapped = (pairs[..., 3:8] & 15) << 4 | pairs[..., 5:10] >> 4
        return torch.cat((swapped, pairs[..., 11:].expand(*pairs.shape[:-1], 2), pairs[..., :3] ^ 130), -1)

    given = torch.zeros(2, 3, 8, 6, dtype=torch.uint8)
    permutation = nibble_permutation.find(make, given)
    assert permutation.size == 12 and len(permutation.table) == 10
    some = torch.randint(0, 256, (5, 3, 8, 6), dtype=torch.uint8)
    out = torch.empty(5, 3, 4, 10, dtype=torch.uint8)
    nibble_permutation.permute(permutation, some, out)
    assert torch.equal(out, make(some))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x + 1,  # a sum
        lambda x: x << 1,  # bits cross the border of a nibble
        lambda x: x.flip(0),  # from one unit to another
        lambda x: x.float(),
        lambda x: x[..., :0],
    ],
)
def test_what_is_no_move_is_left_to_torch(make):
    assert nibble_permutation.find(make, torch.zeros(4, 2, 16, dtype=torch.uint8)) is None


@pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")
@pytest.mark.parametrize("codec", [q2_k, q4_0, q4_k, q5_1, q5_k, q6_k, q8_0, affine], ids=name_of)
def test_forms(codec):
    """They all are such permutations: what prompts copy to a GPU is not repacked by torch."""
    weights = torch.randn(3, 40, 512, generator=torch.Generator().manual_seed(0))
    zeros = torch.randint(0, 16, (40, 4), dtype=torch.int16)
    in_groups = torch.randint(0, 16, (40, 512), dtype=torch.uint8), torch.rand(40, 4).half().float(), zeros
    encoded = (lambda _: in_groups) if codec is affine else lambda expert: codec.encode(weights[expert])
    here = gpu_layout.parts(stack(codec, encoded, weights.shape))

    def make(x):
        return gpu_layout.parts(gpu_layout.repack_for_gpu(here.of([x]))).tensors[0]

    given = here.tensors[0]
    permutation = nibble_permutation.find(make, given[:1])
    want = make(given)
    out = torch.empty_like(want)
    nibble_permutation.permute(permutation, given, out)
    assert torch.equal(out, want)


@pytest.mark.parametrize("size, made, some, arch", checked([(2368, 2432, False), (544, 544, True)], TRITON))
def test_kernel_compiles(size, made, some, arch, monkeypatch):
    pytest.importorskip("triton")
    from phalanx.kernels.moe import nibble_permutation_triton

    permutation = nibble_permutation.Permutation(
        torch.zeros(made, dtype=torch.int32), torch.zeros(made, dtype=torch.uint8), size
    )
    launches = Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(nibble_permutation_triton, "permute_kernel", launches)
        parts = torch.zeros(1, dtype=torch.int32) if some else None
        nibble_permutation_triton.permute(
            permutation, *(torch.empty(5, n, dtype=torch.uint8) for n in (size, made)), parts
        )
    compile_launch(nibble_permutation_triton.permute_kernel, *launches.found[0], arch)


@pytest.mark.long
def test_kernel():
    """In Triton's interpreter, which a process has from its beginning."""
    pytest.importorskip("triton")
    code = """
import torch
from phalanx.kernels.moe import nibble_permutation, nibble_permutation_triton
from phalanx.tests.kernels.attention.decoding import mend_interpreter

mend_interpreter()
for units, size, made in ((1, 7, 9), (19, 300, 1100), (8, 40, 40)):
    table = torch.randint(0, 2 * size, (made,)) | torch.randint(0, 2 * size, (made,)) << 16
    permutation = nibble_permutation.Permutation(table.int(), torch.randint(0, 256, (made,), dtype=torch.uint8), size)
    given = torch.randint(0, 256, (units, size), dtype=torch.uint8)
    out = torch.empty(units, made, dtype=torch.uint8)
    nibble_permutation_triton.permute(permutation, given, out)
    want = nibble_permutation.permute_reference(permutation, given)
    assert torch.equal(out.flatten(), want)
    some = torch.zeros_like(out)
    nibble_permutation_triton.permute(permutation, given, some, torch.tensor([units // 2], dtype=torch.int32))
    assert torch.equal(some[: units // 2], out[: units // 2]) and not some[units // 2 :].any()
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
