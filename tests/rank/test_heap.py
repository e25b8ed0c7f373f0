"""Objects that the garbage collector passes over while a model is loaded."""

import gc
import weakref

from phalanx.rank import heap


class Ring:
    def __init__(self):
        self.own = self


def test_frozen_objects_are_freed_when_the_model_is(monkeypatch):
    monkeypatch.setattr(heap, "gc", gc)  # tests/conftest.py has replaced it
    before, kept = weakref.ref(Ring()), Ring()
    heap.freeze()
    try:
        assert before() is None and gc.get_freeze_count() > 1000
        seen, kept = weakref.ref(kept), None
        gc.collect()
        assert seen() is not None  # the collector has not looked at it
    finally:
        heap.collect()
    assert seen() is None and gc.get_freeze_count() > 1000  # the others stay out of the way
