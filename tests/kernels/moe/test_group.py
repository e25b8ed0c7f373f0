"""Pairs sorted by expert and cut into tiles: the reference against pairs one by one, and the kernel against that."""

from typing import NamedTuple

import pytest
import torch
from phalanx.kernels.moe.group import THREADS, Groups, LocalExperts, group, local_ids, max_tiles

from .. import cuda_model
from .cases import CASES, Sizes, make, shares


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("rows", [1, 16, 128])
@pytest.mark.parametrize("sizes", [one for one in CASES if one.tokens])
def test_groups_of_some_experts_have_their_routed_tokens_alone(sizes, rows):
    ids = make(sizes, torch.float32).ids
    for local_experts in shares(sizes.experts):
        found = group(ids, local_experts.size, rows, local_experts)
        assert len(found.offsets) == local_experts.size + 1
        sorted_routed = found.sorted_ids[: int(found.offsets[-1])].long()
        chosen = ids.flatten()[sorted_routed]
        assert torch.equal(chosen, chosen.sort().values)
        assert sorted(sorted_routed.tolist()) == [
            i for i, e in enumerate(ids.flatten().tolist()) if e in local_experts.ids
        ]
        needed = found.tile_expert >= 0
        starts = [
            at
            for e in range(local_experts.size)
            for at in range(int(found.offsets[e]), int(found.offsets[e + 1]), rows)
        ]
        assert found.tile_start[needed].tolist() == starts and not needed[len(starts) :].any()


@pytest.mark.parametrize("rows", [1, 16, 128])
@pytest.mark.parametrize("sizes", [one for one in CASES if one.tokens])
def test_groups_cover_every_routed_token_once(sizes, rows):
    ids = make(sizes, torch.float32).ids
    found = group(ids, sizes.experts, rows)
    covered = []
    for expert, start in zip(found.tile_expert.tolist(), found.tile_start.tolist(), strict=True):
        if expert >= 0:
            routed = found.sorted_ids[start : min(start + rows, int(found.offsets[expert + 1]))]
            assert len(routed) and (ids.flatten()[routed.long()] == expert).all()
            covered += routed.tolist()
    assert sorted(covered) == list(range(ids.numel()))


def test_no_more_tiles_are_needed():
    """The most that any choice takes, by trying all splits of few pairs."""
    for routed in range(1, 9):
        for rows in (1, 2, 3):
            for experts in (1, 2, 3):
                splits = [(a, b, routed - a - b) for a in range(routed + 1) for b in range(routed + 1 - a)]
                needed = max(sum(-(-n // rows) for n in s) for s in splits if not any(s[experts:]) or experts == 3)
                assert max_tiles(routed, experts, rows) >= needed
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
def test_the_kernels_of_many_routed_tokens(sizes, rows, some, cuda_models):
    """In parts, of which the last is not full: by fewer threads than there are experts, and by more."""
    case = Case.of(sizes, rows, some)
    part = 128
    parts = -(-case.ids.numel() // part)
    counts = torch.full((parts, case.experts), -9, dtype=torch.int32)
    case.launch(cuda_models, "count_parts", parts, part, case.ids, counts)
    chosen = local_ids(case.ids, case.experts, case.local_experts)
    for got, ids in zip(counts, chosen.split(part), strict=True):
        assert torch.equal(got.long(), torch.bincount(ids, minlength=case.experts)[: case.experts])
    case.launch(cuda_models, "group_parts", parts, part, case.ids, counts, *case.found)
    case.check()


class Case(NamedTuple):
    ids: torch.Tensor
    experts: int
    rows: int
    local_experts: LocalExperts | None
    want: Groups
    found: Groups

    @classmethod
    def of(cls, sizes, rows, some):
        ids = make(sizes, torch.float32).ids
        local_experts = shares(sizes.experts)[1] if some else None
        experts = local_experts.size if local_experts else sizes.experts
        want = group(ids, experts, rows, local_experts)
        return cls(ids, experts, rows, local_experts, want, Groups(*(torch.full_like(one, -9) for one in want)))

    def launch(self, cuda_models, name, blocks, part, *tensors):
        """The kernel in as many threads as a part has pairs, at most THREADS."""
        threads = min(part, THREADS)
        sizes = dict(T=torch.int64, EXPERTS=self.experts, ROWS=self.rows, THREADS=threads, PART=part)
        tiles = () if name == "count_parts" else (len(self.found.tile_expert),)
        args = *tensors, self.ids.numel(), *tiles, self.local_experts.first if self.local_experts else 0
        library = cuda_models.build("group", sizes, name)
        cuda_model.launch(library, (blocks, 1, 1), threads, args, self.ids)

    def check(self):
        want, found = self.want, self.found
        assert torch.equal(found.offsets, want.offsets) and torch.equal(found.tile_expert, want.tile_expert)
        needed = want.tile_expert >= 0
        assert torch.equal(found.tile_start[needed], want.tile_start[needed])
        for start, end in zip(want.offsets.tolist(), want.offsets[1:].tolist(), strict=False):
            assert torch.equal(found.sorted_ids[start:end].sort().values, want.sorted_ids[start:end])
