"""Memory that stays: objects that the garbage collector passes over while a model is loaded, and what is freed."""

import ctypes
import gc
import subprocess
import sys
import textwrap
import weakref

import pytest
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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another C library than glibc, or an old one")
def test_large_blocks_go_back_after_a_larger_one_was_freed():
    """In a process of its own, as nothing undoes it."""
    program = """
        import ctypes, sys
        from phalanx.rank import heap

        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        libc.mallinfo2.restype = Figures = type("Figures", (ctypes.Structure,), {
            "_fields_": [(name, ctypes.c_size_t) for name in "heap a b c mapped d e f g h".split()]})
        if sys.argv[1] == "return":
            heap.return_large()
        libc.free(ctypes.c_void_p(libc.malloc(16 << 20)))
        before = libc.mallinfo2()
        libc.malloc(4 << 20)
        after = libc.mallinfo2()
        print((after.heap - before.heap) >> 20, (after.mapped - before.mapped) >> 20)
        """
    command = [sys.executable, "-P", "-c", textwrap.dedent(program)]
    grown = lambda how: subprocess.run([*command, how], capture_output=True, text=True, check=True).stdout.split()  # noqa: E731
    assert grown("return") == ["0", "4"]
    assert grown("keep") != ["0", "4"]
