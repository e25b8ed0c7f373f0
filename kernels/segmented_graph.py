"""CUDA graphs in segments: where something on the host stands between two kernels, a capture ends and another begins.

`on_host` marks a function that has to run there. While `SegmentedGraph` captures, it is kept, to be called at each
replay between the segments; else it is called at once. `SegmentedGraph.later` keeps one that is called once its whole
segment is on its way to the GPU, which may wait for it there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

Host = Callable[[int], None]  # told how many of the step's tokens are real: captured steps are padded


class Borrowed:
    """A tensor of captured memory, for a function between two segments. It is not kept: once the function has run,
    later segments may have its memory, as if it had been captured, too."""

    def __init__(self, x: torch.Tensor):
        self._whole = x if capturing() is None else None  # it is not captured
        self._dtype = x.dtype
        self._described = dict(
            shape=tuple(x.shape), typestr=f"<i{x.element_size()}", data=(x.data_ptr(), False), version=2,
            strides=tuple(stride * x.element_size() for stride in x.stride()),
        )  # fmt: skip

    @functools.cached_property
    def tensor(self) -> torch.Tensor:
        """Not in a capture."""
        if self._whole is not None:
            return self._whole
        # The tensor keeps what it is made of, where Python finds no cycles: it must not be made of this object.
        described = SimpleNamespace(__cuda_array_interface__=self._described)
        return torch.as_tensor(described, device="cuda").view(self._dtype)


class _Capturing(threading.local):
    segmented: SegmentedGraph | None = None  # what this thread captures


_capturing = _Capturing()


def on_host(function: Host, tokens: int) -> None:
    """Call function(tokens) on the host once all kernels before are launched, and before any kernel after is."""
    if _capturing.segmented is not None:
        _capturing.segmented.cut(function)
    else:
        function(tokens)


def capturing() -> SegmentedGraph | None:
    """The capture of this thread."""
    return _capturing.segmented


class SegmentedGraph:
    """A captured step: graphs, and functions on the host between them."""

    def __init__(self, pool: Any):
        """pool: torch's graph_pool_handle(), which the graphs of a model share."""
        self._pool = pool
        self._parts: list[tuple[torch.cuda.CUDAGraph, list[Host]]] = []  # with what is called once it is launched
        self._hosts: list[Host] = []  # of the segment that is captured

    def __len__(self) -> int:
        """How many graphs."""
        return len(self._parts)

    def capture(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """function()'s result. Other threads may use the GPU meanwhile."""
        _capturing.segmented = self
        try:
            self._begin()
            result = function()
            self._end()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._graph.capture_end()
            raise
        finally:
            _capturing.segmented = None
        return result

    def cut(self, function: Host) -> None:
        self._hosts.append(function)
        self._end()
        self._begin()

    def later(self, function: Host) -> None:
        """Call function(tokens) at each replay once the segment that is captured now is launched."""
        self._hosts.append(function)

    def replay(self, tokens: int) -> None:
        """tokens: that are real, of those that were captured."""
        for graph, functions in self._parts:
            graph.replay()
            for function in functions:
                function(tokens)

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        self._graph.capture_end()
        self._parts.append((self._graph, self._hosts))
        self._hosts = []
