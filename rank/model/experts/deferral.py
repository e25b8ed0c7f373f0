"""Expert deferral: sums that the CPU makes for a layer are added in the next layer with experts.

After KTransformers (Chen et al. 2025, SOSP): so the CPU computes while the GPU is at the next layer's attention and its
resident experts, and neither waits for the other. What a layer's missing experts add, the next layer's attention does
not see yet, so tokens differ. Only decode steps of few tokens do it, where the GPU would wait most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ..batch import Batch
from .host_buffers import KEPT

if TYPE_CHECKING:
    from .split import GpuSum


class Deferral:
    """Of one rank: whether this step defers."""

    def __init__(self) -> None:
        self.allowed = True  # no: for measuring what it costs
        self.step = False
        self.used = False  # whether any step has deferred: not where kernels do not reach the host's memory
        self.owed: Tensor | None = None  # on CPUs: [T, H] f32 that the next layer adds
        self._sum: GpuSum | None = None  # on GPUs: the same, of their part of experts that the CPU computes with them

    def begin(self, batches: Sequence[Batch]) -> None:
        """A step begins. All its rows have to go through all layers."""
        one = batches[0]
        alone = len(batches) == 1 and one.sampled is None
        self.step = self.allowed and alone and one.num_decodes == len(one.ids) <= KEPT

    def gpu_sums(self, made: GpuSum | None, order: Order) -> tuple[GpuSum | None, GpuSum | None]:
        """Of a layer whose GPU makes `made`: what it adds itself, and what the layer before has left for it."""
        owed = None if order.first else self._sum
        self._sum = None if order.last else made
        return (made if order.last else None), owed


class Order(NamedTuple):
    """Where a layer stands among those of its stage that have experts in host memory."""

    place: int
    layers: int

    @property
    def first(self) -> bool:
        return self.place == 0

    @property
    def last(self) -> bool:
        return self.place == self.layers - 1

    @property
    def buffer(self) -> int:
        """Which of two buffers has its tokens and sums: the CPU may still compute those of the layer before."""
        return self.place % 2
