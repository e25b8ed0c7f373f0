"""Multi-head latent attention on a GPU, by kernels that Triton has compiled, against the torch references."""

import functools
from types import SimpleNamespace

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.attention import attention, mla, mla_decode
from phalanx.kernels.attention.backend import AttentionParams
from phalanx.kernels.candidate import choose

from ...devices import require_gpu
from ..gpu import run_steps
from . import latents
from .latents import DEEPSEEK, LENGTHS, SIZES, Sizes, latent_cache
from .test_attention import make_rows
from .test_mla_decode import Step, part_of_step

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
@pytest.mark.parametrize("query_len", [1, 4])
def test_decode(sizes, dtype, bound, most, query_len):
    for lengths in (*LENGTHS, [5000, 0, 257, 1]):
        latents.check_decode(sizes, lengths, most, dtype, bound, "cuda", query_len=query_len)


@pytest.mark.parametrize("dtype, bound", KINDS[1:])
@pytest.mark.parametrize(
    "heads, size, fp8", [(16, 16, False), (5, 7, False), (128, 64, False), (16, 16, True), (5, 48, True)]
)
@pytest.mark.parametrize("most, fill", [(1, 1), (4, 2), (64, 4), (64, 64)])
def test_cuda_decode(dtype, bound, heads, size, fp8, most, fill):
    for lengths in (*LENGTHS, [5000, 0, 257, 1], [256] * 64):
        step = Step(lengths, dtype, heads, size, fp8=fp8)
        want, rows = step.want(), latents.to(step.rows, "cuda")
        given = step.q.cuda(), step.cache.cuda(), rows.block_tables, rows.lengths
        scales = step.scales.cuda() if fp8 else None
        for _ in range(3):  # counts are left as they were
            out = step.out.cuda()
            mla_decode.decode(*given, out, 0.1, most, fill, scales=scales)
            torch.testing.assert_close(out.cpu().float(), want, atol=bound, rtol=bound)
    assert not jit.counters(out.device, torch.cuda.current_stream().cuda_stream).any()


@pytest.fixture(params=["triton", "cuda"])
def decoded_by(request, monkeypatch):
    monkeypatch.setattr(mla_decode, "LEAST_SEQUENCES", 1 if request.param == "cuda" else 1 << 16)
    return request.param


def test_what_is_chosen(decoded_by):
    step = Step([40, 3], torch.bfloat16)
    step.q, step.cache, step.out = (x.cuda() for x in (step.q, step.cache, step.out))
    part = part_of_step(step)
    found = choose(attention.CANDIDATES["cuda"], part)
    assert found.name == {"cuda": "mla_decode.cu", "triton": "mla_triton.py"}[decoded_by]


class Layers:
    """Decode steps of 64 sequences through layers that follow each other; all that they are given differs from step to
    step."""

    COUNT, LAYERS, STEPS, WIDTH = 64, 3, 20, 30  # WIDTH: blocks of a sequence

    def __init__(self):
        made = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        count, blocks = self.COUNT, self.COUNT * self.WIDTH
        self.starts = torch.arange(count, dtype=torch.int32, device="cuda") * 7 % 400 + 20
        self.kept, self.up = made(self.LAYERS, blocks, 16, 576), made(16, 256, 512) / 512**0.5
        self.given = made(self.STEPS, self.LAYERS, count, 16 * 192 + 576)
        self.x, self.found = (
            self.given[0].clone(),
            torch.zeros(self.LAYERS, count, 2048, device="cuda", dtype=torch.bfloat16),
        )
        self.norm, self.cos_sin = latents.moved(*latents.norm_and_angles(count, DEEPSEEK, torch.bfloat16, True), "cuda")
        tables = torch.randperm(blocks, dtype=torch.int32, device="cuda").view(count, self.WIDTH)
        self.rows = SimpleNamespace(
            block_tables=tables, lengths=self.starts.clone(), slots=self.starts.long(), num_decodes=count,
            query_len=1,            query_lens=[1] * count, kv_lens=[1 << 15] * count, scratch={},
        )  # fmt: skip

    def __call__(self, caches, pause):
        rows, count = self.rows, self.COUNT
        rows.lengths.add_(1)
        at = rows.lengths.long() - 1
        rows.slots.copy_(rows.block_tables.gather(1, (at // 16)[:, None])[:, 0].long() * 16 + at % 16)
        pause()
        for x, cache, found in zip(self.x, caches, self.found, strict=True):
            q, new = x.split([16 * 192, 576], 1)
            args = q.view(count, 16, 192), new, self.norm, self.cos_sin, cache, self.up, rows, AttentionParams(0.1)
            made = mla.store_and_attend(*args)
            pause()
            found.copy_(made)


def test_steps_that_begin_early(decoded_by):
    """Steps as graphs, where kernels begin before what is before them has ended, and one by one with a pause after
    each."""
    step, stream = Layers(), torch.cuda.Stream()

    reset = functools.partial(step.rows.lengths.copy_, step.starts)
    run = functools.partial(run_steps, step, step.x, step.kept, reset=reset)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        want = run(torch.cuda.synchronize, False)
        assert want[0].isfinite().all()
        for _ in range(3):
            assert all(map(torch.equal, run(lambda: None, True), want))


@pytest.mark.parametrize("sizes", [*SIZES, DEEPSEEK])
@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("expanded", [False, True])
def test_whole_steps(sizes, dtype, bound, expanded, monkeypatch, decoded_by):
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
