"""Small-batch steps with a GPU: neither side waits for Python or for launches between two layers.

The host's part of a layer is to look for its tokens and choices in pinned memory, to choose, and to compute some of its
experts on the CPU (kernels/moe/host_service.py). Meanwhile the GPU brings others over itself, computes them, and waits
for the CPU's sums. All that is launched is captured, as one graph for a whole step; what is not known then, as which
experts are copied, lies in memory (kernels/moe/host_exchange.py). Copied experts that are chosen more often than
resident ones take their places there, so the resident set follows what is chosen without copies of its own.

Kernels that bring experts and compute them take their time also where there are none, which a step of one token waits
for in every layer. So where the CPU is about as fast as copies, steps of the fewest routed tokens leave all that is
missing to it, and an expert comes over only to become resident, while the CPU computes: the step waits only for what is
left of the copy when the CPU is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ....kernels.moe import host_exchange, host_service
from ....kernels.moe.host_choice import ADOPTED, Choice, Residency
from ....kernels.moe.host_exchange import Exchange, Made, Part, Slots
from ....kernels.moe.host_experts import Experts, Round
from ....kernels.moe.host_service import Layer, Step
from ....kernels.segmented_graph import SegmentedGraph, capturing
from .host_buffers import Buffer, HostStack, HostView, Views
from .streamer import Streamer

# Most routed tokens of a step that the CPU serves alone: of more the GPU has a share that is worth its kernels.
CPU_ROUTED = 16
# Times the copy of one of many experts that the copy of a single one takes, by the kernel that fetches it
# (h100-fetch-2026-11-25.txt): a CPU that takes longer for an expert than that is too slow to serve alone.
DEARER = 2.0

Work = Callable[[HostView, int], Round]
Compute = Callable[[Tensor, Tensor, Tensor, Experts, Tensor], Tensor]  # of numbered experts


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
    """Steps of one rank with a GPU: the host's parts of captured ones are posted a segment at a time."""

    def __init__(self, device: torch.device, counters: Counters):
        self.exchange, self.counters = Exchange(device), counters
        self.service = self.exchange.service
        self._told = [0] * len(host_service.SERVED)
        # The latest segment that was captured, and its layers
        self._captured: tuple[SegmentedGraph, int, list[tuple[SmallBatch, HostView]]] | None = None

    def add(self, segmented: SegmentedGraph, small_batch: SmallBatch, view: HostView) -> None:
        """This layer is the next one of what is captured.

        Layers are posted by segments, as the host's part between two of them may `drain`: a layer that is served
        otherwise stands there, and what is not launched yet would never be done.
        """
        latest = self._captured
        if latest is None or latest[0] is not segmented or latest[1] != len(segmented):
            latest = self._captured = segmented, len(segmented), []
            segmented.later(functools.partial(self._post, latest[2], {}))
        latest[2].append((small_batch, view))

    def _post(self, layers: list[tuple[SmallBatch, HostView]], made: dict[int, Step], tokens: int) -> None:
        """A segment of these layers is launched. made: what the host does for so many real tokens."""
        try:
            if tokens not in made:
                made[tokens] = host_service.step([batch.layer_of(view, tokens) for batch, view in layers])
            layers[0][0].streamer.lent()
            self.service.post(made[tokens])
        except BaseException:
            self.service.give_up()
            raise
        self.count()

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


@dataclass
class Shared:
    """State that all layers of a rank share."""

    placement: str
    counters: Counters
    streamer: Streamer
    views: Views = field(default_factory=Views)  # of steps with a GPU
    steps: Steps | None = None  # where the GPU can

    def view(self, x: Tensor, ids: Tensor) -> HostView:
        if self.steps is None and host_exchange.supports(x.device):
            self.steps = Steps(x.device, self.counters)
        return self.views.view(x, ids)


class Sums:
    """Buffers of a layer's tokens and the CPU's sums in a step with a GPU, and what the layer adds: its own sums."""

    def view(self, shared: Shared, x: Tensor, ids: Tensor) -> HostView:
        return shared.view(x, ids)

    def added(self, shared: Shared, x: Tensor, ids: Tensor) -> Made:
        return Made(self.view(shared, x, ids).made)


class SmallBatch:
    """One layer's part of such steps."""

    def __init__(
        self, layer: HostStack, streamer: Streamer, choice: Choice, residency: Residency, work: Work, copies: bool
    ):  # fmt: skip
        """work: of the CPU, for so many tokens. copies: whether experts are copied at all."""
        self.streamer, self.layer, self.choice, self.residency = streamer, layer, choice, residency
        self._work = work
        self.stack: Experts | None = None  # room for what is copied
        self.capacity = 0
        self._slots: Slots | None = None
        # The `_arrivals` of the fewest routed tokens
        self._arriving: Slots | None = None
        self._layers: dict[tuple[int, int], Layer] = {}
        if not copies or not streamer.repacks(layer):
            return
        stage = streamer.lend(layer)
        parts = [Part(*both) for both in zip(layer.tensors, stage.raw.tensors, strict=True)]
        if host_exchange.takes(parts):
            self._parts = host_exchange.table(parts, streamer.device)
            self._ready = stage.ready.tensors
            self.stack = stage.ready.stack
            self.capacity = self.stack.size

    def adopts_into(self, slots: Buffer, table: Tensor, expert_in: Tensor) -> None:
        """Copied experts may become resident in the first ones, as many as `expert_in` has."""
        if not len(expert_in):  # then much is missing, of which copies take a part
            return
        device, none = self.streamer.device, slots.stack.size
        fast = self.choice.costs.cpu[0] <= DEARER * self.choice.costs.copy
        if fast and (permutation := self.streamer.permutations(self.layer)):
            arriving = [Part(*of) for of in zip(self.layer.tensors, slots.tensors, permutation, strict=True)]
            if host_exchange.arrive(arriving):
                self._arriving = Slots(host_exchange.table(arriving, device), table, expert_in, none)
        if self.stack is None:
            return
        parts = [Part(*both) for both in zip(self._ready, slots.tensors, strict=True)]
        if host_exchange.adopts(parts):
            self._slots = Slots(host_exchange.table(parts, device), table, expert_in, none)

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether the exchange takes x of this dtype."""
        hidden = self.layer.stack.w2.shape[1]
        return hidden % 4 == 0 == hidden * dtype.itemsize % 16

    def _arrivals(self, routed: int) -> Slots | None:
        """The slots in which an expert becomes resident in a step that is launched for so many routed tokens, of which
        the CPU computes all missing experts; None: it does not compute all."""
        return self._arriving if routed <= CPU_ROUTED else None

    def limit(self, routed: int) -> int:
        """Experts that a step of so many routed tokens may copy."""
        return min(self.capacity, routed)

    def layer_of(self, view: HostView, tokens: int) -> Layer:
        """The host's part for so many real tokens, which is kept."""
        key = id(view), tokens
        if key not in self._layers:
            ids, made = view.ids[:tokens], view.made[:tokens]
            kept = self._work(view, tokens)
            lag = torch.zeros(1, dtype=torch.float64)
            if self._arrivals(view.ids.numel()) is not None:
                copies = host_service.COPIES_TO_STAY
                call = self.choice.call(ids, self.residency, 1, True, ADOPTED)
            else:
                copies = host_service.COPIES if self.stack is not None else host_service.NO_COPIES
                limit = self.limit(ids.numel())
                call = self.choice.call(ids, self.residency, limit, self._slots is not None, lag=lag)
            of = self.choice, call, lag, kept, made, copies, view, self.residency
            self._layers[key] = host_service.layer(*of)
        return self._layers[key]

    def run(
        self, steps: Steps, view: HostView, resident: Tensor | None, parts: tuple[Tensor, Tensor, Tensor],
        compute: Compute, made: Made,
    ) -> Tensor:  # fmt: skip
        """The layer's sums, [T, H], once `send` and resident experts are launched. parts: x, ids and weights. made:
        the CPU's sums that are added."""
        segmented = capturing()
        if segmented is not None:
            y = self._launch(steps.exchange, resident, parts, compute, made)
            steps.add(segmented, self, view)
            return y
        mine = self.layer_of(view, len(parts[0]))
        steps.service.choose(mine)  # before anything is launched that waits: what it loads may wait for the GPU
        try:
            steps.service.compute(mine)
            y = self._launch(steps.exchange, resident, parts, compute, made)
        except BaseException:
            steps.service.give_up()
            raise
        steps.count()
        return y

    def _launch(
        self, exchange: Exchange, resident: Tensor | None, parts: tuple[Tensor, Tensor, Tensor], compute: Compute,
        made: Made,
    ) -> Tensor:  # fmt: skip
        x, ids, weights = parts
        arrivals = self._arrivals(ids.numel())
        if arrivals is not None:
            assert resident is not None, "there are slots"
            return host_exchange.collect_only(resident, made, x, exchange, arrivals, self.choice.first)
        if self.stack is None:
            return host_exchange.collect(resident, None, made, x, exchange)
        self.streamer.lent()
        fetched = host_exchange.fetch(self._parts, ids, self.capacity, self.choice.first, exchange)
        self.streamer.repack(self.layer, self.limit(ids.numel()), fetched.found)
        copied = compute(x, fetched.numbers, weights, self.stack, fetched.of)
        return host_exchange.collect(resident, copied, made, x, exchange, fetched, self._slots, self.choice.first)
