"""The masks of a grammar on logits, whole and split by vocabulary."""

import random

import numpy as np
import pytest
import torch
from phalanx.kernels.sampling import token_mask
from phalanx.kernels.sampling.token_mask import mask_tokens, mask_tokens_reference

from .. import cuda_model


def bits_of(allowed):
    """[R, words] int32 of booleans [R, tokens]."""
    words = -(-allowed.shape[1] // 32)
    whole = np.zeros((len(allowed), 32 * words), bool)
    whole[:, : allowed.shape[1]] = allowed
    return torch.from_numpy(np.packbits(whole, axis=1, bitorder="little").view(np.int32))


def check(mask, device, dtype, rows, vocab, width, parts):
    """Each rank's part of logits that are padded to parts * width columns."""
    r = np.random.default_rng(rows + vocab)
    whole = torch.from_numpy(r.standard_normal((rows, parts * width)).astype(np.float32)).to(dtype)
    at = np.asarray(sorted(random.Random(vocab).sample(range(rows), max(1, rows // 2))), np.int32)
    allowed = r.random((len(at), vocab)) < 0.3
    want = whole.clone()
    for row, kept in zip(at, allowed, strict=True):
        want[row, :vocab][~torch.from_numpy(kept)] = -torch.inf
    bits = bits_of(allowed).to(device)
    for part in range(parts):
        x = whole[:, part * width : (part + 1) * width].to(device)
        mask(x, torch.from_numpy(at).to(device), bits, part * width)
        beyond = max(0, 32 * bits.shape[1] - part * width)  # padding that has a bit is forbidden too
        expected = want[:, part * width : (part + 1) * width].clone()
        expected[at.tolist(), max(0, vocab - part * width) : beyond] = -torch.inf
        assert torch.equal(x.cpu(), expected)


CASES = [(1, 64, 64, 1), (5, 100, 50, 2), (7, 33, 17, 2), (4, 1000, 350, 3), (3, 40, 60, 2), (2, 4040, 4040, 1)]


@pytest.mark.parametrize("rows, vocab, width, parts", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [mask_tokens, mask_tokens_reference])
def test_forbidden_tokens(mask, dtype, rows, vocab, width, parts):
    check(mask, torch.device("cpu"), dtype, rows, vocab, width, parts)


@pytest.mark.parametrize("rows, vocab, width, parts", CASES)
def test_the_cuda_source(cuda_models, monkeypatch, rows, vocab, width, parts):
    """Thread by thread on a CPU."""

    def load(source, name, dtype, **sizes):
        library = cuda_models.build(source, {"T": dtype, **sizes})
        return lambda grid, threads, *args: cuda_model.launch(library, grid, threads, args, args[0])

    monkeypatch.setattr(token_mask.jit, "kernel", load)
    for dtype in (torch.bfloat16, torch.float16):
        check(token_mask.mask_tokens_cuda, torch.device("cpu"), dtype, rows, vocab, width, parts)


def test_a_view_of_padded_rows():
    whole = torch.zeros(3, 40)
    mask_tokens(whole[:, :33], torch.tensor([1], dtype=torch.int32), torch.tensor([[0, 1]], dtype=torch.int32))
    assert whole[1, :32].isinf().all() and whole[1, 32] == 0 and not whole[[0, 2]].isinf().any()
    assert not whole[1, 33:].isinf().any()


def test_nothing_to_mask():
    x = torch.zeros(0, 40)
    mask_tokens(x, torch.zeros(0, dtype=torch.int32), torch.zeros(0, 2, dtype=torch.int32))
