"""The host's parts of captured steps with a GPU, posted a graph at a time, and what all steps of a rank have used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ....kernels.moe import host_service
from ....kernels.moe.host_exchange import Exchange
from ....kernels.moe.host_service import Step
from ....kernels.segmented_graph import SegmentedGraph

if TYPE_CHECKING:
    from .host_buffers import HostView
    from .small_batch import SmallBatch


@dataclass
class Counters:
    """Experts that layers of steps have used, by how they were served, and experts that became resident."""

    resident: int = 0
    cpu: int = 0
    streamed: int = 0
    loaded: int = 0

    def clear(self) -> None:
        self.resident = self.cpu = self.streamed = self.loaded = 0


class Steps:
    """Steps of one rank with a GPU."""

    def __init__(self, device: torch.device, counters: Counters):
        self.exchange, self.counters = Exchange(device), counters
        self.service = self.exchange.service
        self._told = [0] * len(host_service.SERVED)
        self._captured: tuple[SegmentedGraph, int, Captured] | None = None  # the latest: of which segment

    def add(self, segmented: SegmentedGraph, small_batch: SmallBatch, view: HostView) -> None:
        """This layer is the next one of what is captured.

        Layers are posted by packed tiles, as the host's part between two of them may `drain`: a layer that is served
        otherwise stands there, and what is not launched yet would never be done.
        """
        latest = self._captured
        if latest is None or latest[0] is not segmented or latest[1] != len(segmented):
            latest = self._captured = segmented, len(segmented), Captured(self)
            segmented.later(latest[2].post)
        latest[2].layers.append((small_batch, view))

    def drain(self) -> None:
        """Until all that was posted is done: then nothing else changes which experts are resident."""
        self.service.drain()
        self.count()

    def count(self) -> None:
        """The service's counts since the last call."""
        now = self.service.totals[len(host_service.TIMES) :].tolist()
        for name, new, old in zip(host_service.SERVED, now, self._told, strict=True):
            setattr(self.counters, name, getattr(self.counters, name) + new - old)
        self._told = now


class Captured:
    """A captured packed tile's layers, and what the host does for so many real tokens."""

    def __init__(self, steps: Steps):
        self.steps = steps
        self.layers: list[tuple[SmallBatch, HostView]] = []
        self._made: dict[int, Step] = {}

    def post(self, tokens: int) -> None:
        """The packed tile is launched."""
        service = self.steps.service
        try:
            if tokens not in self._made:
                self._made[tokens] = host_service.step([batch.layer_of(view, tokens) for batch, view in self.layers])
            for batch, _ in self.layers[:1]:
                batch.streamer.lent()
            service.post(self._made[tokens])
        except BaseException:
            service.give_up()
            raise
        self.steps.count()
