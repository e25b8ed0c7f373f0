"""Triton's rotation in its interpreter."""

from ..interpreter import interpret


def test_rotate():
    interpret("rope.rotating")
