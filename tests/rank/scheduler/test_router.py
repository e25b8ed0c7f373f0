"""Requests go where their prompt is known, unless that replica has too much to do."""

import pytest
from phalanx.rank import protocol
from phalanx.rank.scheduler.router import OPEN_SEQUENCE, Router

from .toy import Engine, alone, request


class Replicas:
    """Toy replicas behind a router, stepped together."""

    def __init__(self, count, **options):
        self.engines = [Engine(**options) for _ in range(count)]
        self.router = Router([engine.replica for engine in self.engines])

    def add(self, *args, **options) -> int:
        """The index of the replica that got the request."""
        before = [engine.scheduler.open for engine in self.engines]
        self.router.add(request(*args, **options))
        (chosen,) = (i for i, engine in enumerate(self.engines) if engine.scheduler.open > before[i])
        return chosen

    def run(self):
        for engine in self.engines:
            engine.run()

    def tokens(self, name):
        (found,) = (engine.tokens[name] for engine in self.engines if name in engine.tokens)
        return found


def test_requests_without_anything_in_common_are_spread():
    replicas = Replicas(3)
    assert [replicas.add(str(i), [i, i + 1, i + 2]) for i in range(6)] == [0, 1, 2, 0, 1, 2]
    replicas.run()
    assert all(replicas.tokens(str(i)) == alone([i, i + 1, i + 2], 10) for i in range(6))


def test_a_long_prompt_is_avoided():
    replicas = Replicas(2, max_model_len=400, blocks=200)
    assert replicas.add("long", range(5 * OPEN_SEQUENCE)) == 0
    assert [replicas.add(f"short {i}", [i]) for i in range(4)] == [1, 1, 1, 1]


def test_a_known_beginning_draws_its_requests():
    replicas = Replicas(2, max_model_len=300, blocks=200, budget=300)
    stem = list(range(40)) * 4
    assert replicas.add("other", [7] * 5) == 0
    assert replicas.add("first", stem) == 1
    replicas.run()
    assert [replicas.add(f"more {i}", [*stem, i]) for i in range(2)] == [1, 1]
    replicas.run()
    assert replicas.engines[1].scheduler.counters.cached_tokens == 2 * 160


def test_a_beginning_that_is_on_its_way_draws_them_too():
    replicas = Replicas(2, max_model_len=300, blocks=200)
    stem = list(range(40)) * 4
    assert replicas.add("other", [7] * 20) == 0
    assert [replicas.add(f"{i}", [*stem, i]) for i in range(2)] == [1, 1]


def test_a_known_beginning_does_not_draw_without_end():
    replicas = Replicas(2, max_model_len=300, blocks=400)
    stem = list(range(40)) * 4
    chosen = [replicas.add(f"{i}", [*stem, i]) for i in range(20)]
    assert 0 < sum(chosen) < 20  # the other replica computes it too, and helps


def test_salts_and_caches_that_are_off_keep_prompts_apart():
    replicas = Replicas(2, max_model_len=300, blocks=200)
    assert replicas.add("a", range(100), salt="x") == 0
    assert replicas.add("b", range(100), salt="y") == 1
    assert replicas.add("c", [*range(100), 1], salt="x") == 0
    off = Replicas(2, max_model_len=300, blocks=200, prefix_cache=False)
    assert [off.add(f"{i}", range(100)) for i in range(4)] == [0, 1, 0, 1]


def test_what_a_scheduler_refuses_is_not_remembered():
    replicas = Replicas(2)
    with pytest.raises(ValueError, match="at most 100 fit"):
        replicas.router.add(protocol.Request("a", protocol.pack_u32(range(90)), protocol.SamplingParams(max_tokens=20)))
    assert not replicas.router._sent
