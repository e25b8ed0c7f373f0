"""The CUDA kernel before decoding sequences attend to latents, thread by thread on a CPU."""

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.attention import mla_absorb
from phalanx.kernels.attention.mla import LatentNorm

from .. import cuda_model
from . import latents
from .latents import DEEPSEEK, NAN, norm_and_angles

# Heads, elements of a query without a position, tokens: one, a tile and a part of one, and more heads than lanes.
CASES = [(2, 128, 1), (1, 64, 70), (3, 128, 9), (33, 64, 5)]


@pytest.fixture
def launched(monkeypatch, cuda_models):
    """In place of jit's: kernels run in the model, blocks in any order. What the kernel before writes is not there
    before it has ended: queries and latents."""

    def kernel(source, name, dtype, shared=0, **sizes):
        library = cuda_models.build(source, {"T": dtype, **sizes})

        def launch(grid, threads, *args, shared):
            writes = [(one, torch.full_like(one, NAN)) for one in args[:2]]
            cuda_model.launch(library, grid, threads, args, args[0], seed=1, writes=writes, any_order=True)

        return launch

    monkeypatch.setattr(jit, "kernel", kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "heads, nope, tokens", [*CASES[:2], *(pytest.param(*c, marks=pytest.mark.long) for c in CASES[2:])]
)
def test_absorb(heads, nope, tokens, dtype, launched):
    torch.manual_seed(0)
    sizes = DEEPSEEK._replace(heads=heads, nope=nope)
    latents.check_absorb_cuda(sizes, tokens, dtype == torch.bfloat16, dtype, mla_absorb.absorb_and_store_latents)


def test_what_it_takes():
    def given(dtype=torch.bfloat16, **changed):
        sizes = DEEPSEEK._replace(heads=2, **changed)
        norm, turn = norm_and_angles(3, sizes, dtype, True)
        q = torch.zeros(3, 2, sizes.nope + sizes.rope, dtype=dtype)
        kept = torch.zeros(3, sizes.latent + sizes.rope, dtype=dtype)
        up = torch.zeros(2, sizes.nope + sizes.value, sizes.latent, dtype=dtype)
        return [q, kept, norm, turn, kept.clone().view(1, 3, -1), up]

    def takes(**changed):
        names = ("q", "latents", "norm", "turn", "cache", "up")
        return mla_absorb.supports(*(dict(zip(names, given(), strict=True)) | changed).values())

    assert takes() and mla_absorb.supports(*given(torch.float16, nope=64, value=12))
    for one in (given(torch.float32), given(latent=256), given(rope=32), given(nope=120)):
        assert not mla_absorb.supports(*one)
    q, kept, norm, turn, cache, up = given()
    others = [
        dict(q=q.half()), dict(q=q.transpose(0, 1).contiguous().transpose(0, 1)), dict(cache=cache.half()),
        dict(latents=torch.zeros(3, 580, dtype=q.dtype)[:, 4:]), dict(up=up.transpose(1, 2)),
        dict(norm=LatentNorm(norm.weight.float(), 1e-6)), dict(turn=turn._replace(cos=turn.cos.double())),
    ]  # fmt: skip
    assert not any(takes(**one) for one in others)
