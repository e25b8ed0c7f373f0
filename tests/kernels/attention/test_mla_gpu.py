"""Multi-head latent attention on a GPU, by kernels that Triton has compiled, against the torch references."""

import pytest
import torch
from phalanx.kernels.attention import mla
from phalanx.kernels.attention.backend import AttentionParams

from ...devices import require_gpu
from . import latents
from .latents import DEEPSEEK, LENGTHS, SIZES, Sizes, latent_cache
from .test_attention import make_rows

require_gpu()
# Scores of 576 products and up to 25 in size: what f32 rounds of them is in the weights.
KINDS = [(torch.float32, 1e-4), (torch.bfloat16, 2.5e-2), (torch.float16, 4e-3)]


@pytest.fixture(autouse=True)
def no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("sizes", [*SIZES, DEEPSEEK])
@pytest.mark.parametrize("dtype, bound", KINDS)
def test_store(sizes, dtype, bound):
    for interleaved in (False, True):
        latents.check_store(sizes, interleaved, dtype, bound, "cuda")


@pytest.mark.parametrize("sizes", [*SIZES, DEEPSEEK, DEEPSEEK._replace(heads=128)])
@pytest.mark.parametrize("dtype, bound", KINDS)
def test_absorb(sizes, dtype, bound):
    for interleaved in (False, True):
        latents.check_absorb(sizes, interleaved, dtype, bound, "cuda")


@pytest.mark.parametrize("sizes", [*SIZES, DEEPSEEK, DEEPSEEK._replace(heads=128)])
@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("most", [1, 4, 64])
def test_decode(sizes, dtype, bound, most):
    for lengths in (*LENGTHS, [5000, 0, 257, 1]):
        latents.check_decode(sizes, lengths, most, dtype, bound, "cuda")


@pytest.mark.parametrize("sizes", [*SIZES, DEEPSEEK])
@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("expanded", [False, True])
def test_whole_steps(sizes, dtype, bound, expanded, monkeypatch):
    """Decoding sequences alone, beside prompts and chunks, and a chunk alone."""
    monkeypatch.setattr(mla, "expands", lambda *_: expanded)
    for query_lens, kv_lens in (([1, 1, 1], [9, 2, 700]), ([1, 1, 7, 200, 130], [300, 2, 7, 200, 333]), ([6], [1000])):
        whole_step(sizes, query_lens, kv_lens, dtype, bound)


def test_few_heads_at_once(monkeypatch):
    monkeypatch.setattr(mla, "EXPANDED_BYTES", 1200 * 256 * 2 * 3)
    monkeypatch.setattr(mla, "CONTEXT", 1000)
    whole_step(DEEPSEEK, [1, 700, 500], [100, 700, 1200], torch.bfloat16, 2.5e-2)


def whole_step(sizes: Sizes, query_lens, kv_lens, dtype, bound):
    """store_and_attend, whose tokens the cache does not have, beside the references in dtype and in f32."""
    blocks = sum(-(-n // sizes.block_size) for n in kv_lens) + 2
    rows, params = make_rows(query_lens, kv_lens, sizes.block_size, blocks), AttentionParams(0.1)
    cache, rows.slots = latent_cache(rows, sizes, blocks, dtype), latents.new_slots(rows, sizes.block_size)
    up = (torch.randn(sizes.heads, sizes.nope + sizes.value, sizes.latent) * sizes.latent**-0.5).to(dtype)
    tokens, width = sum(query_lens), sizes.latent + sizes.rope
    q, new = torch.randn(tokens, sizes.heads, sizes.nope + sizes.rope).to(dtype), torch.randn(tokens, width).to(dtype)
    cache.view(-1, width)[rows.slots] = latents.NAN
    norm, cos_sin = latents.norm_and_angles(tokens, sizes, dtype, interleaved=True)
    stored = cache.cuda()
    given = q.cuda(), new.cuda(), *latents.moved(norm, cos_sin, "cuda"), stored, up.cuda()
    mla.rope_and_store_latents_reference(q, new, norm, cos_sin, cache, rows.slots)
    want = mla.latent_attention(q.float(), cache.float(), up.float(), rows, params)
    rows.scratch.clear()
    got = mla.store_and_attend(*given, latents.to(rows, "cuda"), params)
    torch.testing.assert_close(got.float().cpu(), want, atol=bound, rtol=bound)
    torch.testing.assert_close(stored.cpu(), cache, atol=bound, rtol=bound, equal_nan=True)
