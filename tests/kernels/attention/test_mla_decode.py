"""The CUDA kernel for decoding sequences of latents, thread by thread on a CPU."""

from types import SimpleNamespace

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.attention import mla_decode
from phalanx.kernels.attention.backend import AttentionParams, Part
from phalanx.kernels.attention.reference import paged_attention_reference, slots_of
from phalanx.kernels.device import HALF_SHARED
from phalanx.kernels.rope import fp8_cache

from .. import cuda_model
from ..cuda_model import Box
from .decoding import part_of
from .latents import DEEPSEEK, NAN, fp8_latents, latent_cache
from .test_attention import make_rows

BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
TMA = mla_decode.Tiles("mla_tma", 64, 8, 2)
WIDTH, LATENT = mla_decode.WIDTH, mla_decode.LATENT


class Launcher:
    """In place of jit's: kernels run in the model, blocks in any order. New tensors hold NaN."""

    def __init__(self, monkeypatch, models):
        self.models, self.counts, self.writes = models, torch.zeros(1 << 10, dtype=torch.int32), []
        self.seed, self.grids = 0, []
        monkeypatch.setattr(jit, "kernel", self.kernel)
        monkeypatch.setattr(jit, "counters", lambda *_: self.counts)
        monkeypatch.setattr(jit, "tensor_map", lambda at, rows, columns, high, _: Box(at, rows, columns, high))
        monkeypatch.setattr(mla_decode, "device_caps", lambda _: SimpleNamespace(num_sms=4))
        monkeypatch.setattr(mla_decode, "current_stream", lambda: 0)
        real = torch.Tensor.new_empty
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *a, **k: real(x, *a, **k).fill_(NAN))

    def kernel(self, source, name, dtype, shared=0, **sizes):
        library = self.models.build(source, {"T": dtype, **sizes})

        def launch(grid, threads, *args, shared=0, overlap):
            assert shared <= 227 << 10 and overlap
            self.seed += 1
            self.grids.append(grid)
            options = dict(seed=self.seed, writes=self.writes, any_order=True)
            cuda_model.launch(library, grid, threads, args, args[0], x=args[2], **options)

        return launch


@pytest.fixture
def launcher(monkeypatch, cuda_models):
    torch.manual_seed(0)
    return Launcher(monkeypatch, cuda_models)


def not_yet(x: torch.Tensor) -> torch.Tensor:
    """Contents of a tensor of numbers, codes or scales before it is written."""
    return torch.full_like(x, NAN if x.is_floating_point() else 0x7F)


class Step:
    """A step of one token of each sequence; what is no token's is NaN. The reference computes in f32."""

    def __init__(self, lengths, dtype=torch.bfloat16, heads=16, size=16, spare=2, fp8=False):
        sizes = DEEPSEEK._replace(heads=heads, block_size=size)
        blocks = sum(-(-n // size) for n in lengths) + spare  # the tables' order depends on it
        self.rows = make_rows([1] * len(lengths), lengths, size, blocks)
        self.cache, self.scales = latent_cache(self.rows, sizes, blocks, dtype), None
        if fp8:
            self.cache, self.scales = fp8_latents(self.cache, LATENT)
        self.q = torch.randn(len(lengths), heads, WIDTH).to(dtype)
        self.out = torch.full((len(lengths), heads, LATENT), NAN, dtype=dtype)
        self.keep = [i for i, n in enumerate(lengths) if n]

    def tokens(self, at: int) -> list[torch.Tensor]:
        """Each sequence's token from its end on, in the cache, with its scales."""
        size = self.cache.shape[1]
        slots = [slots_of(self.rows, i, size)[at] for i in self.keep if self.rows.kv_lens[i] >= -at]
        found = [self.cache.view(-1, WIDTH)[slot] for slot in slots]
        if self.scales is not None:
            found = [one.view(torch.uint8) for one in found]
            found += [self.scales[slot // size, 0, part, slot % size :][:1] for slot in slots for part in (0, 1)]
        return found

    def want(self) -> torch.Tensor:
        want = torch.zeros(self.out.shape)
        keys = self.cache.float()[:, :, None]
        if self.scales is not None:
            slots = torch.arange(keys[..., 0].numel())
            keys = fp8_cache.gather_latents(self.cache, self.scales, slots, LATENT, torch.float32).view(keys.shape)
        params, rows = AttentionParams(0.1), part_of(self.rows, self.keep)
        found = paged_attention_reference(self.q.float()[self.keep], keys, keys[..., :LATENT], rows, params)
        want[self.keep] = found.view(-1, *want.shape[1:])
        return want

    def decode(self, launcher, most: int, fill: int) -> torch.Tensor:
        """The kernel before has written when it has ended: queries, and the step's own tokens."""
        launcher.writes += [(one, not_yet(one)) for one in (self.q, *self.tokens(-1))]
        rows, scales = self.rows, self.scales
        mla_decode.decode(
            self.q, self.cache, rows.block_tables, rows.lengths, self.out, 0.1, most, fill, scales=scales
        )  # fmt: skip
        launcher.writes.clear()
        assert not launcher.counts.any()
        return self.out


# Lengths, parts at most, parts of short sequences, panels that a block holds, or 0 with TMA, and what else a step has:
# of one part and of several, on one level and on two, tiles and panels that are full and that are not, a ring that is
# filled once and that goes round.
CASES = [
    ([1, 0, 33, 128], 1, 1, 5, {}),
    ([200, 0, 65, 31], 4, 4, 5, dict(heads=5, size=7)),
    ([200], 8, 8, 5, dict(dtype=torch.float16, heads=20, spare=4)),
    ([0], 2, 2, 5, dict(heads=1)),
    ([16, 17, 255, 257, 96], 2, 1, 4, dict(size=1)),
    ([1500, 577], 32, 4, 5, dict(heads=33, spare=5)),
    ([1024, 2], 64, 64, 8, dict(heads=2, size=64)),
    ([900, 161], 2, 4, 5, dict(dtype=torch.float16, heads=17, size=32)),
]
# Cases of a cache in e4m3, by the kernel of GPUs without TMA.
FP8_CASES = [
    ([1, 0, 34, 127], 1, 1, 8, dict(fp8=True)),
    ([200, 0, 65, 31], 4, 4, 5, dict(heads=5, size=48, fp8=True)),
    ([200], 8, 8, 6, dict(dtype=torch.float16, heads=20, spare=4, fp8=True)),
    ([0], 2, 2, 8, dict(heads=1, fp8=True)),
    ([1500, 577], 32, 4, 8, dict(heads=33, spare=5, size=64, fp8=True)),
    ([900, 161], 2, 4, 4, dict(dtype=torch.float16, heads=17, size=32, fp8=True)),
]
# And with TMA, by tiles of 64 tokens, of which two are held.
TMA_CASES = [
    ([1, 0, 66, 127], 1, 1, 0, dict(fp8=True)),
    ([400, 0, 129, 64], 4, 2, 0, dict(heads=5, size=48, fp8=True)),
    ([200], 8, 8, 0, dict(dtype=torch.float16, heads=20, spare=4, fp8=True)),
    ([0], 2, 2, 0, dict(heads=1, fp8=True)),
    ([1500, 577], 32, 4, 0, dict(heads=33, spare=5, size=64, fp8=True)),
    ([2125], 1, 1, 0, dict(dtype=torch.float16, heads=17, size=32, fp8=True)),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "lengths, most, fill, panels, options",
    [
        *CASES[:3],
        *FP8_CASES[:3],
        *TMA_CASES[:3],
        *(pytest.param(*one, marks=pytest.mark.long) for one in CASES[3:] + FP8_CASES[3:] + TMA_CASES[3:]),
    ],
)
def test_decode(lengths, most, fill, panels, options, launcher, monkeypatch):
    tiles = mla_decode.Tiles("mla_cp_async", 32, panels, 1) if panels else TMA
    monkeypatch.setattr(mla_decode, "choose_tiles", lambda *_: tiles)
    step = Step(lengths, **options)
    want = step.want()
    got = step.decode(launcher, most, fill)
    bound = BOUNDS[step.q.dtype]
    torch.testing.assert_close(got.float(), want, atol=bound, rtol=bound)
    groups = -(-step.q.shape[1] // 16)
    assert launcher.grids == [(len(lengths) * groups, most, 1)]


def test_the_last_block_does_not_matter(launcher):
    """Which block of a sequence is the last to come, and adds the parts up, leaves the sum as it is."""
    step = Step([90], heads=2)
    first = step.decode(launcher, 4, 4).clone()
    for _ in range(3):
        assert torch.equal(step.decode(launcher, 4, 4), first)


def test_what_is_read_early(launcher):
    """Tokens of earlier steps are, so they must be there; the step's own are not."""
    step = Step([70], heads=1)
    for at, early in ((-70, True), (-60, True), (-1, False)):
        launcher.writes += [(one, not_yet(one)) for one in step.tokens(at)]
        assert step.decode(launcher, 1, 1).isnan().any().item() == early


@pytest.fixture(params=[mla_decode.Tiles("mla_cp_async", 32, 5, 2), TMA], ids=lambda tiles: tiles.header)
def tma(request, monkeypatch):
    monkeypatch.setattr(mla_decode, "choose_tiles", lambda *_: request.param)


def test_numbers_of_all_sizes_in_e4m3(launcher, tma):
    """Scales from one end of their range to the other; queries of a head that are 0, large, and small."""
    step = Step([70, 33], heads=4, fp8=True)
    step.scales[step.scales != 255] = torch.randint(105, 135, (int((step.scales != 255).sum()),), dtype=torch.uint8)
    step.q *= 2.0**-12
    step.q[0, 0] = 0
    step.q[0, 1, :LATENT], step.q[1, 2, LATENT:] = step.q[0, 1, :LATENT] * 2.0**-100, 0
    want = step.want()
    got = step.decode(launcher, 1, 1).float()
    assert ((got - want).abs() <= 2e-2 * want.abs().amax(2, keepdim=True)).all()


def test_many_small_weights_in_e4m3(launcher, tma):
    """A sum is left of 700 tokens whose weights are 2^-23 of another one's, which has a value of 0: f16 keeps them."""
    step = Step([701], heads=1, fp8=True)
    codes, (tokens,) = step.cache.view(torch.uint8).view(-1, WIDTH), [slots_of(step.rows, 0, 16)]
    codes[tokens, :LATENT], codes[tokens, LATENT:], step.scales[:] = 0x38, 0, 127  # ones, and zeros
    codes[tokens[0], :LATENT], codes[tokens[0], LATENT] = 0, 0x72  # 160
    step.q.zero_()[0, 0, LATENT] = 1
    torch.testing.assert_close(step.decode(launcher, 1, 1).float(), step.want(), atol=0, rtol=1e-2)


def part_of_step(step: Step, **changed) -> Part:
    keys, n = step.cache[:, :, None], len(step.q)
    rest = dict(rows=step.rows, params=AttentionParams(0.1), first=0, stop=n, out=step.out)
    return Part(**dict(q=step.q, keys=keys, values=keys[..., :LATENT]) | rest | changed)


@pytest.fixture
def chosen(monkeypatch):
    monkeypatch.setattr(mla_decode, "LEAST_SEQUENCES", 1)


def test_as_a_backend(launcher, chosen):
    """Prompts behind decoding sequences are left alone."""
    step = Step([40, 3, 9], heads=3)
    part, want = part_of_step(step, stop=2), step.want()
    assert mla_decode.supports(part)
    mla_decode.run(part)
    assert launcher.grids == [(2, 2, 1)]
    torch.testing.assert_close(step.out[:2].float(), want[:2], atol=2e-2, rtol=2e-2)
    assert step.out[2].isnan().all()


def test_what_it_takes(monkeypatch, chosen):
    step = Step([3, 4], heads=2)
    assert mla_decode.supports(part_of_step(step)) and mla_decode.supports(part_of_step(step, stop=1))
    keys, q = step.cache[:, :, None], step.q
    others = [
        dict(q=q.float()), dict(q=q.half()), dict(q=q.float(), keys=keys.float()), dict(values=keys),
        dict(values=keys[..., :LATENT].clone()), dict(params=AttentionParams(0.1, window=4)),
        dict(keys=keys[..., :570], values=keys[..., :LATENT]), dict(scales=torch.zeros(1)), dict(first=2),
        dict(q=q.transpose(0, 1)), dict(out=torch.zeros(2, 2, 1024, dtype=q.dtype)[..., ::2]),
    ]  # fmt: skip
    assert not any(mla_decode.supports(part_of_step(step, **one)) for one in others)
    monkeypatch.setattr(mla_decode, "LEAST_SEQUENCES", 3)
    assert not mla_decode.supports(part_of_step(step))


@pytest.mark.parametrize("size, taken", [(16, True), (48, True), (8, False), (1, False)])
def test_caches_in_e4m3(size, taken, monkeypatch):
    """Caches of any number of sequences; the scales of 16 tokens lie side by side in a block."""
    monkeypatch.setattr(mla_decode, "LEAST_SEQUENCES", 9)
    step = Step([3, 4], heads=2, size=size, fp8=True)
    assert mla_decode.supports(part_of_step(step, scales=step.scales)) is taken
    assert not mla_decode.supports(part_of_step(step))


def test_parts():
    """KV splits are as many as there is room for, in a graph; no more than there are tiles."""
    sizes = [(1, 64), (16, 16), (64, 4), (100, 2), (128, 2), (256, 1)]
    assert [(blocks, mla_decode.choose_kv_splits(blocks, 1 << 15, 264)) for blocks, _ in sizes] == sizes
    assert mla_decode.choose_kv_splits(1, 32, 264) == 1 and mla_decode.choose_kv_splits(1, 33, 264) == 2
    for fp8 in (False, True):
        tiles = mla_decode.choose_tiles(torch.device("cpu"), fp8)
        assert mla_decode.shared_bytes(tiles, fp8) <= HALF_SHARED and tiles.per_sm == 2
