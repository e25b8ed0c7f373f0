"""The host's parts of captured steps with a GPU, posted a graph at a time, and what all steps of a rank have used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ....kernels.graph_pieces import Pieces
from ....kernels.moe import host_service
from ....kernels.moe.host_exchange import Exchange
from ....kernels.moe.host_service import Step

if TYPE_CHECKING:
    from .few_tokens import FewTokens
    from .host_buffers import HostView


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
        self._captured: tuple[Pieces, int, Captured] | None = None  # the latest: of which piece

    def add(self, pieces: Pieces, few: FewTokens, view: HostView) -> None:
        """This layer is the next one of what is captured.

        Layers are posted by packed tiles, as the host's part between two of them may `drain`: a layer that is served
        otherwise stands there, and what is not launched yet would never be done.
        """
        latest = self._captured
        if latest is None or latest[0] is not pieces or latest[1] != len(pieces):
            latest = self._captured = pieces, len(pieces), Captured(self)
            pieces.later(latest[2].post)
        latest[2].layers.append((few, view))

    def drain(self) -> None:
        """Until all that was posted is done: then nobody else changes which experts are resident."""
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
        self.layers: list[tuple[FewTokens, HostView]] = []
        self._made: dict[int, Step] = {}

    def post(self, tokens: int) -> None:
        """The packed tile is launched."""
        service = self.steps.service
        try:
            if tokens not in self._made:
                self._made[tokens] = host_service.step([few.layer_of(view, tokens) for few, view in self.layers])
            for few, _ in self.layers[:1]:
                few.streamer.lent()
            service.post(self._made[tokens])
        except BaseException:
            service.give_up()
            raise
        self.steps.count()
