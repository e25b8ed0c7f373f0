"""The ranks' barriers under random interleavings, and that each of their parts is needed."""

import random

import pytest

from .barrier_model import FLAWS, MAIL_FLAWS, ROW, WRAP, Group, Wrong, run


def attempt(seed: int, flaw: str = "", kinds: tuple[str, ...] = ()) -> None:
    """A few calls of random kinds, of these if there are any, sizes and grids."""
    rng = random.Random(seed)
    size = rng.choice([2, 2, 3, 4])
    start = rng.choice([0, WRAP - 2, WRAP - 6])  # the count wraps around
    group = Group(size, blocks=3, threads=4, rng=rng, start=start, flaw=flaw)
    mixed = ["one_shot", "two_shot", "two_shot_add_norm", "push_add_norm", "one_way_push_add_norm", "received_add_norm"]
    kinds = kinds or rng.choice([mixed, ["push_add_norm"], ["one_way_push_add_norm"], ["received_add_norm"]])
    calls = []
    for _ in range(rng.randint(2, 6)):
        kind = rng.choice(kinds)
        count = rng.choice([1, 3, 4, 5, 9, 13])
        if kind.endswith("norm"):
            rows = -(-count // 2)
            if kind == "received_add_norm":
                calls.append(("gemm", rng.randint(1, 2), rows * ROW))
            calls.append((kind, min(rows, group.blocks), rows * ROW))
        else:
            length = count * size if kind == "two_shot" else count
            calls.append((kind, min(-(-count // group.threads), group.blocks), length))
    run(group, calls)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 8))])
def test_all_ranks_get_the_sum_whatever_the_interleaving(part):
    for seed in range(5):
        attempt(1000 * part + seed)


@pytest.mark.sample(5)
@pytest.mark.parametrize("flaw", FLAWS)
def test_the_scheduler_finds_what_is_left_out(flaw):
    first = 19 if flaw in ("only used blocks count", "shares of other blocks' rows") else 0  # which earlier seeds miss
    for seed in range(first, 400):
        try:
            attempt(seed, flaw)
        except Wrong:
            return
    raise AssertionError(f"{flaw}: no interleaving fails, so it is not needed, or not tried")


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["push_add_norm", pytest.param("one_way_push_add_norm", marks=pytest.mark.long)])
@pytest.mark.parametrize("flaw", MAIL_FLAWS)
def test_what_is_sent_needs_its_zeros(kind, flaw):
    for seed in range(400):
        try:
            attempt(seed, flaw, (kind,))
        except Wrong:
            return
    raise AssertionError(f"{flaw}: no interleaving fails")


@pytest.mark.parametrize("flaw", ["no first barrier", "no barrier", "relaxed flags"])
def test_what_gemms_have_sent_needs_both_barriers(flaw):
    for seed in range(400):
        try:
            attempt(seed, flaw, ("received_add_norm",))
        except Wrong:
            return
    raise AssertionError(f"{flaw}: no interleaving fails")
