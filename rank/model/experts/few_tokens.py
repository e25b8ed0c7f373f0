"""Steps of few tokens beside a GPU: one launch a layer, without a wait of the host for it, or of the GPU for the host.

The host looks for a layer's tokens and choices in pinned memory, decides, and launches all up to the next layer's.
While the CPU computes its experts, the GPU brings others over itself, computes them, and waits for the CPU's sums. All
that is launched is captured; what is not known then, as which experts are copied, lies in memory
(kernels/moe/host_exchange.py).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ....kernels.moe import host_exchange
from ....kernels.moe.host_choice import Choice
from ....kernels.moe.host_exchange import Exchange, Part
from ....kernels.moe.host_experts import Experts
from .host_buffers import KEPT, HostStack, HostView
from .streamer import Streamer

FEW = KEPT  # tokens

Compute = Callable[[Tensor, Tensor, Tensor, Experts, Tensor], Tensor]  # of numbered experts


class FewTokens:
    """One layer's part of such steps."""

    def __init__(self, layer: HostStack, streamer: Streamer, first: int, copies: bool):
        """first: the router's number of expert 0. copies: whether experts are copied at all."""
        self.streamer, self.layer, self.first = streamer, layer, first
        self.stack: Experts | None = None  # room for what is copied
        self.capacity = 0
        if not copies or not streamer.makes_over(layer):
            return
        stage = streamer.lend(layer)
        parts = [Part(*both) for both in zip(layer.tensors, stage.raw.tensors, strict=True)]
        if host_exchange.takes(parts):
            self._parts = host_exchange.table(parts, streamer.device)
            self.stack = stage.ready.stack
            self.capacity = self.stack.size

    def limit(self, pairs: int) -> int:
        """Experts that a step of so many pairs may copy."""
        return min(self.capacity, pairs)

    def ask(self, exchange: Exchange, choice: Choice) -> None:
        """Have the experts that are to be copied brought by what is launched next."""
        if self.stack is not None:
            exchange.ask(choice.copied)
            self.streamer.lent()

    def copied(self, exchange: Exchange, x: Tensor, ids: Tensor, weights: Tensor, compute: Compute) -> Tensor | None:
        """What experts make that were asked for: launches alone. None: none ever are."""
        if self.stack is None:
            return None
        numbers, count, of = host_exchange.fetch(self._parts, ids, self.capacity, self.first, exchange)
        self.streamer.make_over(self.layer, self.limit(ids.numel()), count)
        return compute(x, numbers, weights, self.stack, of)


def send(x: Tensor, ids: Tensor, weights: Tensor, slots: Tensor, view: HostView, exchange: Exchange) -> Tensor:
    """A step's tokens on their way to the host. Returns slots[ids]."""
    return host_exchange.send(x, ids, weights, slots, (view.x, view.ids, view.weights), exchange)
