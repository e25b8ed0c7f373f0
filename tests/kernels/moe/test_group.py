"""Pairs sorted by expert and cut into tiles: the reference against pairs one by one, and the kernel against that."""

from typing import NamedTuple

import pytest
import torch
from phalanx.kernels.moe.group import THREADS, Groups, Held, group, local_experts, max_tiles

from .. import cuda_model
from .cases import CASES, Sizes, make, shares


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("rows", [1, 16, 128])
@pytest.mark.parametrize("sizes", [one for one in CASES if one.tokens])
def test_groups_of_some_experts_have_their_pairs_alone(sizes, rows):
    ids = make(sizes, torch.float32).ids
    for held in shares(sizes.experts):
        found = group(ids, held.size, rows, held)
        assert len(found.ends) == held.size + 1
        sorted_pairs = found.order[: int(found.ends[-1])].long()
        chosen = ids.flatten()[sorted_pairs]
        assert torch.equal(chosen, chosen.sort().values)
        assert sorted(sorted_pairs.tolist()) == [i for i, e in enumerate(ids.flatten().tolist()) if e in held.ids]
        needed = found.tile_expert >= 0
        starts = [at for e in range(held.size) for at in range(int(found.ends[e]), int(found.ends[e + 1]), rows)]
        assert found.tile_start[needed].tolist() == starts and not needed[len(starts) :].any()


@pytest.mark.parametrize("rows", [1, 16, 128])
@pytest.mark.parametrize("sizes", [one for one in CASES if one.tokens])
def test_groups_cover_every_pair_once(sizes, rows):
    ids = make(sizes, torch.float32).ids
    found = group(ids, sizes.experts, rows)
    covered = []
    for expert, start in zip(found.tile_expert.tolist(), found.tile_start.tolist(), strict=True):
        if expert >= 0:
            pairs = found.order[start : min(start + rows, int(found.ends[expert + 1]))]
            assert len(pairs) and (ids.flatten()[pairs.long()] == expert).all()
            covered += pairs.tolist()
    assert sorted(covered) == list(range(ids.numel()))


def test_no_more_tiles_are_needed():
    """The most that any choice takes, by trying all splits of few pairs."""
    for pairs in range(1, 9):
        for rows in (1, 2, 3):
            for experts in (1, 2, 3):
                splits = [(a, b, pairs - a - b) for a in range(pairs + 1) for b in range(pairs + 1 - a)]
                needed = max(sum(-(-n // rows) for n in s) for s in splits if not any(s[experts:]) or experts == 3)
                assert max_tiles(pairs, experts, rows) >= needed
    assert max_tiles(2048, 128, 16) == 128 + 1920 // 16


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("sizes, rows", [(Sizes(300, 8, 130, 8, 8), 16), (Sizes(9, 2, 5, 8, 8, "few"), 8)])
def test_the_kernel(sizes, rows, some, cuda_models):
    """Thread by thread on a CPU: of more experts than a warp has lanes, and of more pairs than threads."""
    case = Case.of(sizes, rows, some)
    case.launch(cuda_models, "group", 1, THREADS, case.ids, *case.found)
    case.check()


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("sizes, rows", [(Sizes(300, 8, 130, 8, 8), 16), (Sizes(150, 2, 5, 8, 8, "few"), 8)])
def test_the_kernels_of_many_pairs(sizes, rows, some, cuda_models):
    """In parts, of which the last is not full: by fewer threads than there are experts, and by more."""
    case = Case.of(sizes, rows, some)
    part = 128
    parts = -(-case.ids.numel() // part)
    counts = torch.full((parts, case.experts), -9, dtype=torch.int32)
    case.launch(cuda_models, "count_parts", parts, part, case.ids, counts)
    chosen = local_experts(case.ids, case.experts, case.held)
    for got, ids in zip(counts, chosen.split(part), strict=True):
        assert torch.equal(got.long(), torch.bincount(ids, minlength=case.experts)[: case.experts])
    case.launch(cuda_models, "group_parts", parts, part, case.ids, counts, *case.found)
    case.check()


class Case(NamedTuple):
    ids: torch.Tensor
    experts: int
    rows: int
    held: Held | None
    want: Groups
    found: Groups

    @classmethod
    def of(cls, sizes, rows, some):
        ids = make(sizes, torch.float32).ids
        held = shares(sizes.experts)[1] if some else None
        experts = held.size if held else sizes.experts
        want = group(ids, experts, rows, held)
        return cls(ids, experts, rows, held, want, Groups(*(torch.full_like(one, -9) for one in want)))

    def launch(self, cuda_models, name, blocks, part, *tensors):
        """The kernel in as many threads as a part has pairs, at most THREADS."""
        threads = min(part, THREADS)
        sizes = dict(T=torch.int64, EXPERTS=self.experts, ROWS=self.rows, THREADS=threads, PART=part)
        tiles = () if name == "count_parts" else (len(self.found.tile_expert),)
        args = *tensors, self.ids.numel(), *tiles, self.held.first if self.held else 0
        library = cuda_models.build("group", sizes, name)
        cuda_model.launch(library, (blocks, 1, 1), threads, args, self.ids)

    def check(self):
        want, found = self.want, self.found
        assert torch.equal(found.ends, want.ends) and torch.equal(found.tile_expert, want.tile_expert)
        needed = want.tile_expert >= 0
        assert torch.equal(found.tile_start[needed], want.tile_start[needed])
        for start, end in zip(want.ends.tolist(), want.ends[1:].tolist(), strict=False):
            assert torch.equal(found.order[start:end].sort().values, want.order[start:end])
