"""Expert deferral: sums that the CPU makes for a layer are added in the next layer with experts.

After KTransformers (Chen et al. 2025, SOSP): so the CPU computes while the GPU is at the next layer's attention and its
resident experts, and neither waits for the other. What a layer's missing experts add, the next layer's attention does
not see yet, so tokens differ. Only decode steps of a small batch do it, where the GPU would wait most.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....kernels.moe.host_exchange import Made
from ..batch import Batch
from .host import HostExperts
from .host_buffers import KEPT, HostView, Views
from .small_batch import Shared, Sums


class Deferral:
    """Defers the sums of a stage's layers with a GPU, in the steps that can."""

    def __init__(self, layers: Sequence[HostExperts]):
        self.step = False  # whether this one defers
        odd = Views()
        for place, layer in enumerate(layers):
            layer.sums = LateSums(self, place, place == len(layers) - 1, odd)

    def begin(self, batches: Sequence[Batch]) -> None:
        """A step begins. All its rows have to go through all layers."""
        one = batches[0]
        alone = len(batches) == 1 and one.sampled is None
        self.step = alone and one.num_decodes == len(one.ids) <= KEPT


class LateSums(Sums):
    """A layer's sums by the CPU, which the next layer adds; the last layer adds its own as well.

    Layers alternate between two views: the CPU may still compute the layer before.
    """

    def __init__(self, deferral: Deferral, place: int, last: bool, odd: Views):
        """odd: the views of every second layer."""
        self._deferral, self._place, self._last, self._odd = deferral, place, last, odd

    def view(self, shared: Shared, x: Tensor, ids: Tensor) -> HostView:
        return self._view(shared, x, ids, self._place)

    def added(self, shared: Shared, x: Tensor, ids: Tensor) -> Made:
        if not self._deferral.step:
            return super().added(shared, x, ids)
        own = self.view(shared, x, ids).made if self._last else None
        return Made(own, self._view(shared, x, ids, self._place - 1).made if self._place else None)

    def _view(self, shared: Shared, x: Tensor, ids: Tensor, place: int) -> HostView:
        return self._odd.view(x, ids) if self._deferral.step and place % 2 else super().view(shared, x, ids)
