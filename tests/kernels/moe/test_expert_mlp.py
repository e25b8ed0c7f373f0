"""The kernel for all of a layer's experts, thread by thread on a CPU."""

from types import SimpleNamespace

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.moe import expert_mlp
from phalanx.kernels.moe.group import group
from phalanx.kernels.moe.moe import LocalExperts

from .. import cuda_model
from .cases import Sizes, make, near, share_of, without_gate
from .reference import fused_experts_reference

# One tile and several, every expert and few, where a block's first item is what it guesses and where it is not,
# and with fewer chunks of an item than a block holds.
CASES = [
    (Sizes(9, 2, 4, 128, 64), 1, None),
    (Sizes(6, 2, 9, 128, 128, "few"), 2, None),
    (Sizes(50, 2, 3, 128, 128), 4, None),
    (Sizes(100, 4, 41, 128, 64), 2, None),
    (Sizes(40, 2, 3, 256, 128), 2, None),
    (Sizes(12, 3, 9, 128, 64), 1, LocalExperts(3, 3, 9)),
    (Sizes(2, 1, 5, 1024, 64, "one"), 2, None),
]
# Without a gate: a last block of half the outputs, with fewer, and whole; inputs that fill no chunk, and none of a box.
UNGATED = [
    (Sizes(9, 2, 4, 128, 192), 1, None),
    (Sizes(20, 3, 5, 152, 72, "few"), 2, None),
    (Sizes(60, 2, 3, 128, 960), 4, None),
    (Sizes(12, 3, 9, 64, 256), 1, LocalExperts(3, 3, 9)),
]
COUNTED = 1000  # more than a layer's items
NAN = float("nan")


class Launcher:
    """In place of jit's: kernels run in the model, of so many multiprocessors. New tensors hold NaN."""

    def __init__(self, monkeypatch, models):
        self.models, self.blocks, self.seed = models, 1, 0
        self.counts, self.made = torch.zeros(COUNTED, dtype=torch.int32), []
        monkeypatch.setattr(jit, "kernel", self.kernel)
        monkeypatch.setattr(
            jit, "tensor_map", lambda at, rows, columns, high, _: cuda_model.Box(at, rows, columns, high)
        )
        monkeypatch.setattr(jit, "counters", lambda *_: self.counts)
        monkeypatch.setattr(expert_mlp, "device_caps", lambda _: SimpleNamespace(num_sms=self.blocks))
        monkeypatch.setattr(expert_mlp, "current_stream", lambda: 0)
        real = torch.Tensor.new_empty
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *a, **k: self.keep(real(x, *a, **k)))

    def keep(self, x):
        self.made.append(x.fill_(NAN))
        return x

    def kernel(self, source, name, dtype, shared=0, **sizes):
        library = self.models.build(source, {"T": dtype, **sizes})

        def launch(grid, threads, *args, shared=0):
            assert shared <= 227 << 10
            self.seed += 1
            cuda_model.launch(library, grid, threads, args, args[0], seed=self.seed)

        return launch


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "sizes, tiles, local_experts", [*CASES[:4], *(pytest.param(*c, marks=pytest.mark.long) for c in CASES[4:])]
)
def test_experts(sizes, tiles, local_experts, monkeypatch, cuda_models):
    torch.manual_seed(0)
    check(make(sizes, torch.bfloat16), tiles, local_experts, monkeypatch, cuda_models)


@pytest.mark.parametrize("act, dtype, bound", [("relu2", torch.bfloat16, 4e-2), ("silu", torch.float16, 6e-3)])
@pytest.mark.parametrize(
    "sizes, tiles, local_experts", [*UNGATED[:2], *(pytest.param(*c, marks=pytest.mark.long) for c in UNGATED[2:])]
)
def test_experts_without_a_gate(sizes, tiles, local_experts, act, dtype, bound, monkeypatch, cuda_models):
    given = without_gate(make(sizes, dtype))._replace(act=act)
    check(given, tiles, local_experts, monkeypatch, cuda_models, bound)


@pytest.mark.parametrize("sizes", [Sizes(9, 2, 4, 136, 40), Sizes(30, 2, 3, 320, 104)])
def test_sizes_that_tiles_do_not_divide(sizes, monkeypatch, cuda_models):
    check(make(sizes, torch.bfloat16), 1, None, monkeypatch, cuda_models)


def check(given, tiles, local_experts, monkeypatch, cuda_models, bound=4e-2):
    if local_experts:
        given = share_of(given, local_experts)
    x, ids, weights, w13, w2, act, *_ = given
    groups = group(ids, len(w13), 8 * tiles, local_experts)
    want = fused_experts_reference(given)
    launcher = Launcher(monkeypatch, cuda_models)
    args = x, ids, weights, w13, w2, groups, act, tiles
    y = expert_mlp.expert_mlp(*args)
    assert not launcher.counts.any()
    if local_experts:  # a CPU has no kernel that leaves routed tokens out
        here = ((ids >= local_experts.first) & (ids < local_experts.first + local_experts.size)).flatten()
        assert torch.equal(y.isnan().any(1), ~here)
        y = torch.where(here[:, None], y, 0)
    near(y.view(*ids.shape, -1).float().sum(1).to(x.dtype), want, bound)
    assert not launcher.counts.any()


@pytest.mark.parametrize("blocks", [2, 4, 7])
def test_blocks_that_cannot_run_together(blocks, monkeypatch, cuda_models):
    """The model runs one block after the other, as a GPU does whose other multiprocessors are taken: those that find
    blocks missing end after their first item, and the last one does the rest."""
    torch.manual_seed(1)
    given = make(Sizes(9, 2, 4, 128, 128), torch.bfloat16)
    x, ids, weights, w13, w2, act, *_ = given
    launcher = Launcher(monkeypatch, cuda_models)
    args = x, ids, weights, w13, w2, group(ids, len(w13), 8), act, 1
    alone = expert_mlp.expert_mlp(*args)
    launcher.blocks = blocks
    assert torch.equal(expert_mlp.expert_mlp(*args), alone)
    assert not launcher.counts.any()


@pytest.mark.parametrize("tiles", [4, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_borders_of_tiles(tiles, monkeypatch, cuda_models):
    """Experts of no pair, of one, and of as many as fill a tile of 8 rows, and one more."""
    torch.manual_seed(2)
    given = make(Sizes(50, 1, 5, 128, 64), torch.bfloat16)
    ids = torch.tensor([1, *[2] * 24, *[4] * 25], dtype=torch.int32)[torch.randperm(50)]
    given = given._replace(ids=ids.view(50, 1))
    x, ids, weights, w13, w2, act, *_ = given
    launcher = Launcher(monkeypatch, cuda_models)
    y = expert_mlp.expert_mlp(x, ids, weights, w13, w2, group(ids, len(w13), 8 * tiles), act, tiles)
    near(y, fused_experts_reference(given), 4e-2)
    assert not launcher.counts.any()


@pytest.mark.parametrize("one_expert", [False, True])
@pytest.mark.parametrize("blocks", [4, pytest.param(7, marks=pytest.mark.long)])
def test_several_blocks(blocks, one_expert, monkeypatch, cuda_models):
    """The model runs them one after the other, so that none may wait: rows of h are there from the start.

    With one expert, number 1, of four items the last is of w2: block 3 guesses that it is the first one of expert 1.
    """
    torch.manual_seed(1)
    given = make(Sizes(6, 1, 5, 128, 192) if one_expert else Sizes(20, 2, 5, 128, 192), torch.bfloat16)
    if one_expert:
        given = given._replace(ids=torch.ones_like(given.ids))
    x, ids, weights, w13, w2, act, *_ = given
    groups = group(ids, len(w13), 8)
    launcher = Launcher(monkeypatch, cuda_models)
    args = x, ids, weights, w13, w2, groups, act, 1
    want = expert_mlp.expert_mlp(*args)
    h = launcher.made[0].clone()
    assert h.isfinite().all()
    launcher.blocks, launcher.counts[: len(groups.tile_expert)] = blocks, COUNTED
    monkeypatch.setattr(launcher, "keep", lambda x: x.copy_(h) if x.shape == h.shape else x.fill_(NAN))
    assert torch.equal(expert_mlp.expert_mlp(*args), want)
    used = int((groups.tile_expert >= 0).sum())
    assert (launcher.counts[:used] == COUNTED + 3 + 1).all()  # items of a tile: 192 / 64 of the first GEMM, 128 / 128
    assert not launcher.counts[len(groups.tile_expert) :].any()
