"""Shares of API keys: quotas of what is held, and whose entries go first of what is kept."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from phalanx.rank.server.shares import Budget, SharedStore


@dataclass
class One:
    key: int
    size: int = 1
    running: bool = False


@pytest.mark.parametrize(
    ("total", "keys", "floor", "quota"), [(100, 1, 0, 100), (100, 4, 10, 25), (100, 50, 10, 10), (5, 9, 10, 5)]
)
def test_the_quota_of_a_key(total, keys, floor, quota):
    assert Budget(total, keys, floor).quota == quota


def test_a_budget_is_bounded_for_each_key_and_in_all():
    budget = Budget(100, 2, 60)  # where the floors are more than there is, the total decides
    assert budget.take("a", 60)
    assert not budget.take("a", 1)
    assert budget.left("b") == 40
    assert not budget.take("b", 41) and budget.take("b", 40)
    budget.give("a", 20)
    assert (budget.held("a"), budget.left("a"), budget.left("b")) == (40, 20, 20)
    budget.force("b", 50)  # of before
    assert budget.left("a") < 0
    assert not budget.take("a", 1)


def test_the_key_that_has_most_loses_its_oldest():
    store = SharedStore(4, 1000)
    for id, key in [("b1", 1), ("a1", 0), ("a2", 0), ("a3", 0), ("a4", 0)]:
        store.put(id, One(key))
    assert [id in store for id in ("b1", "a1", "a2", "a3", "a4")] == [True, False, True, True, True]
    store.put("a2", One(0))  # used again: it is the last to go
    store.put("b2", One(1))
    assert [id in store for id in ("b1", "a2", "a3", "a4", "b2")] == [True, True, False, True, True]


def test_bytes_are_taken_from_who_has_most_of_them():
    store = SharedStore(100, 100)
    for i in range(9):
        store.put(f"small{i}", One(1, 1))
    for i in range(5):
        store.put(f"large{i}", One(0, 40))
    assert sum(one.key == 1 for one in store) == 9 and store.bytes == 89 and "large4" in store


def test_what_is_running_stays():
    store = SharedStore(2, 100)
    entries = [One(0, 60, running=True) for _ in range(3)]
    for i, one in enumerate(entries):
        store.put(str(i), one)
    assert len(store) == 3 and store.bytes == 180
    entries[0].running = False
    store.trim()
    assert len(store) == 2 and "0" not in store
    store.pop("1")
    store.pop("1")
    assert store.bytes == 60 and len(store) == 1
