"""Experts in host memory, and three ways to serve one: resident on the device, computed by the CPU, or copied over.

A step knows which experts its tokens have chosen. Those in the layer's resident set are computed on the device as ever.
Of the others, the CPU computes some where they lie while copies of the rest come to the device (host_choice.py).
With very many tokens nearly every expert is chosen: then no step waits for the choice, and all others are copied.

Where the host's memory cannot hold all experts of a layer, the rank's first ones are fixed: they are on the device
alone, in the last slots, and never leave them. Here experts are numbered from the first one in host memory on, and the
fixed ones come last.

Captured small-batch steps are whole (small_batch.py). Others are in segments around the host's part
(kernels/segmented_graph.py): a segment ends with copies of the layer's tokens and choices to the host; the next one
computes the resident experts meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....kernels import jit
from ....kernels.moe import host_exchange
from ....kernels.moe.host_choice import CHEAPEST, COPIED, ON_CPU, Choice, Costs, Residency
from ....kernels.moe.host_experts import Experts, HostRouted, Round, computed_in
from ....kernels.moe.moe import Biases, Inputs, LocalExperts, fused_experts
from ....kernels.segmented_graph import on_host
from .host_buffers import KEPT, Buffer, HostStack, HostView
from .small_batch import Shared, SmallBatch, Sums

ALL = 4  # stream all experts once there are ALL times as many routed tokens as experts
LOOKED = 512  # tokens up to which steps look in any case, as captured steps must: copies are the host's part of these
KNOWN = 256  # fillings of a buffer that a layer remembers
TURN = 4  # steps between two looks at a layer's resident set
AUTO, CPU, STREAM = "auto", "cpu", "stream"
NUMBERS = {AUTO: CHEAPEST, CPU: ON_CPU, STREAM: COPIED}


class HostExperts:
    """One layer's experts in host memory, some of them in `slots` on the device as well, and its fixed ones there."""

    def __init__(
        self, layer: HostStack, biases: Biases, act: str, local_experts: LocalExperts, slots: Buffer, costs: Costs,
        shared: Shared, fixed: HostStack | None = None,
    ):  # fmt: skip
        """biases: on the device, of all experts of the rank. local_experts: the router's numbers of these. costs: of
        the layer's format. fixed: the first ones, on the device as `layer` has the others; they are copied to the last
        slots."""
        self.sums = Sums()
        self.layer, self.act, self.slots, self.shared = layer, act, slots, shared
        self.fixed = local_experts.size - layer.stack.size
        # The router's numbers of those in host memory
        self.local_experts = LocalExperts(local_experts.first + self.fixed, layer.stack.size, local_experts.total)
        self.biases = _each(biases, lambda x: x.roll(-self.fixed, 0) if self.fixed else x)
        self.device = shared.streamer.device
        self.on_gpu = self.device.type == "cuda"
        self.biases_of_all = _each(biases, lambda x: x.cpu().to(computed_in(x.dtype)))  # in the router's order
        self.host_biases = _each(self.biases_of_all, lambda x: x[self.fixed :])
        self.set = Residency.of_first(self.local_experts.size, slots.stack.size - self.fixed)
        self._steps = 0
        self._choice = Choice(
            self.local_experts.size, self.local_experts.first, costs, NUMBERS[shared.placement], self.fixed
        )
        # The device slot of each of the router's numbers; as many as there are slots: it has none.
        numbers = self._numbers(self.set.slot_of, slots.stack.size)
        numbers[local_experts.first : self.local_experts.first] = self.set.slots + np.arange(self.fixed)
        self._slot = torch.from_numpy(numbers).to(self.device)
        in_slot = np.concatenate((np.arange(self.set.slots), self.local_experts.size + np.arange(self.fixed)))
        self._in_slot = torch.from_numpy(in_slot).to(self.device)  # each slot's expert, for biases
        self._known: dict[bytes, tuple[Tensor, Tensor]] = {}
        for some, buffer in shared.streamer.copies(layer, np.arange(self.set.slots)):
            self._fill(some[0], buffer, len(some))
        at_once = shared.streamer.at_once(layer)  # a form's buffer is as large as the host's experts need it
        for first in range(0, self.fixed, at_once):
            assert fixed is not None, "the layer lacks experts"
            for some, buffer in shared.streamer.copies(fixed, np.arange(first, min(first + at_once, self.fixed))):
                self._fill(self.set.slots + some[0], buffer, len(some))

    def _fill(self, slot: int, buffer: Buffer, count: int) -> None:
        """So many slots from this one on, with the buffer's first experts."""
        for mine, theirs in zip(self.slots.tensors, buffer.tensors, strict=True):
            mine[slot : slot + count] = theirs[:count]

    def seconds(self, routed: int) -> float:
        """Seconds of the longest step with so many routed tokens, all experts chosen equally often."""
        costs, missing = self._choice.costs, self.local_experts.size - self.set.slots
        cpu = float(costs.of_rows(np.array(routed / self.local_experts.total)))
        if not self.on_gpu:
            return (self.local_experts.size + self.fixed) * cpu
        return missing * (cpu if self.shared.placement == CPU else costs.copy)

    # -- a step

    def begin(self, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        """Begin what the device does alone. x [T, H], ids [T, k] int32, weights [T, k] f32."""
        pending = Pending(x, ids, weights)
        if not self.on_gpu:
            return pending
        if self.shared.placement == CPU or len(x) <= LOOKED or ids.numel() < ALL * self.local_experts.total:
            view = pending.view = self.sums.view(self.shared, x, ids)
            pending.small_batch = self._small_batch(x, ids, weights)
            if pending.small_batch is not None:
                assert self.shared.steps is not None
                to = view.x, view.ids, view.weights
                numbers = host_exchange.send(*pending.parts, self._slot, to, self.shared.steps.exchange)
                if self.slots.stack.size:
                    pending.made = self._on_numbers(x, numbers, weights, self.slots.stack, self._in_slot)
                return pending
            view.send(x, ids, weights)
            if self.slots.stack.size:
                on_host(view.sent, len(x))
        if self.slots.stack.size:
            pending.made = self._on_device(x, ids, weights, self.slots.stack, self._slot, self._in_slot)
        return pending

    def finish(self, pending: Pending) -> Tensor:
        """This rank's part of the experts' weighted sums, [T, H]."""
        x, view = pending.x, pending.view
        if not self.on_gpu:
            return self._on_cpu(*pending.parts).to(x.dtype)
        if view is None:
            self._drain()
            missing = np.flatnonzero(self.set.slot_of < 0)
            self._count(self.slots.stack.size, 0, len(missing))
            made = pending.made
            for part in self._streamed(*pending.parts, missing):
                made = part if made is None else made.add_(part)
            return torch.zeros_like(x) if made is None else made
        if pending.small_batch is not None:
            assert self.shared.steps is not None
            made_there = self.sums.added(self.shared, *pending.parts[:2])
            of = self.shared.steps, view, pending.made, pending.parts
            return pending.small_batch.run(*of, self._on_numbers, made_there)
        on_host(functools.partial(self._from_host, view), len(x))
        return view.out.to(x.dtype) if pending.made is None else pending.made.add_(view.out)

    def _on_device(
        self, x: Tensor, ids: Tensor, weights: Tensor, stack: Experts, numbers: Tensor, of: Tensor
    ) -> Tensor:
        """numbers: of each of the router's experts, its index in `stack`, or len(stack). of: each index's expert."""
        return self._on_numbers(x, numbers.index_select(0, ids.flatten()).view_as(ids), weights, stack, of)

    def _on_numbers(self, x: Tensor, numbers: Tensor, weights: Tensor, stack: Experts, of: Tensor) -> Tensor:
        """numbers [T, k] int32: each routed token's index in `stack`, or what is past its end."""
        biases = Biases(*(None if one is None else one.index_select(0, of) for one in self.biases))
        local_experts = LocalExperts(0, stack.size, self.local_experts.total + 1)
        return fused_experts(Inputs(x, numbers, weights, *stack, self.act, biases, local_experts))

    # -- for small batches with a GPU

    @functools.cached_property
    def small_batch(self) -> SmallBatch:
        """The small-batch steps, for x that they support."""
        of, copies = (self._choice, self.set, self._kept), self.shared.placement != CPU
        made = SmallBatch(self.layer, self.shared.streamer, *of, copies)
        if self.shared.placement == AUTO:
            made.adopts_into(self.slots, self._slot, self._in_slot[: self.set.slots])
        return made

    def _small_batch(self, x: Tensor, ids: Tensor, weights: Tensor) -> SmallBatch | None:
        """Who computes such a step, where it can be."""
        if self.shared.steps is None or len(x) > KEPT:
            return None
        if self.shared.placement == STREAM and self.small_batch.capacity < min(ids.numel(), self.local_experts.size):
            return None
        return self.small_batch if jit.plain(x, ids, weights) and self.small_batch.supports(x.dtype) else None

    def _drain(self) -> None:
        """Before what is resident is read or changed here: small-batch steps change it, too."""
        if self.shared.steps is not None:
            self.shared.steps.drain()

    def _streamed(self, x: Tensor, ids: Tensor, weights: Tensor, experts: np.ndarray) -> Iterator[Tensor]:
        """The outputs of each buffer of copied experts, [T, H]."""
        for some, buffer in self.shared.streamer.copies(self.layer, experts):
            yield self._on_device(x, ids, weights, buffer.stack, *self._in_buffer(some, buffer.stack.size))

    def _in_buffer(self, experts: np.ndarray, count: int) -> tuple[Tensor, Tensor]:
        """`numbers` and `of` of `_on_device` for a buffer of `count` experts that begins with these. They are kept: in
        prompts the same come step by step, and a small copy to the device may wait behind large ones."""
        key = experts.tobytes()
        if key not in self._known:
            if len(self._known) >= KNOWN:
                self._known.clear()
            at, of = np.full(self.local_experts.size, -1), np.zeros(count, experts.dtype)
            at[experts], of[: len(experts)] = np.arange(len(experts)), experts
            both = self._numbers(at, count), of
            numbers, there = (torch.from_numpy(one).to(self.device, non_blocking=True) for one in both)
            self._known[key] = numbers, there
        return self._known[key]

    def _from_host(self, view: HostView, tokens: int) -> None:
        """The host's part of a step on a GPU: fill view.out for `tokens` real tokens.

        What is copied is launched first, so that copies and the CPU work at the same time."""
        self._drain()
        view.wait(fresh=not self.slots.stack.size)
        choice, out = self._choose(view.ids[:tokens]), view.out[:tokens]
        if choice.found[2] or not choice.found[1]:
            out.zero_()
        x, ids, weights = (one[:tokens] for one in view.on_device)
        for part in self._streamed(x, ids, weights, choice.copied):
            out += part
        if choice.found[1]:
            made = self._by_cpu(view, tokens)
            if choice.found[2]:
                out += made.to(self.device, non_blocking=True)
            else:
                out.copy_(made, non_blocking=True)
        self._move()

    def _by_cpu(self, view: HostView, tokens: int) -> Tensor:
        """The CPU's output of the experts that are chosen for it, in the view's pinned memory: [tokens, H] f32."""
        made = view.made[:tokens]
        if tokens <= KEPT:
            self._kept(view, tokens).run(torch.get_num_threads())
            return made
        fresh = self._pairs(view, tokens)
        fresh.add(self.layer.stack, self._choice.on_cpu, int(self._choice.found[3]))
        return fresh.sum(made)

    def _pairs(self, view: HostView, tokens: int) -> HostRouted:
        x, ids, weights = (one[:tokens] for one in (view.x, view.ids, view.weights))
        return HostRouted(x, ids, weights, self.act, self.host_biases, self.local_experts.first)

    def _kept(self, view: HostView, tokens: int) -> Round:
        """The CPU's part of so small batches."""
        routed = functools.partial(self._pairs, view, tokens)
        return view.work.of(self.layer, self._choice.on_cpu, routed, self.host_biases, view.made[:tokens])

    def _on_cpu(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """All of a step where the device is the CPU. The three ways differ in where the weights are read."""
        choice = self._choose(ids.contiguous())
        counts, first = choice.counts, self.local_experts.first - self.fixed
        routed = HostRouted(x.contiguous(), ids.contiguous(), weights, self.act, self.biases_of_all, first)

        def add(stack: Experts, at: np.ndarray, count: int, fixed: np.ndarray | int = -1) -> None:
            of_all = np.concatenate((np.full(self.fixed, fixed), at))
            routed.add(stack, torch.from_numpy(of_all), count)

        resident, slots_of_fixed = int(counts[self.set.slot_of >= 0].sum()), self.set.slots + np.arange(self.fixed)
        add(self.slots.stack, self.set.slot_of, resident + int(choice.of_fixed.sum()), slots_of_fixed)
        add(self.layer.stack, choice.cpu, int(choice.found[3]))
        for some, buffer in self.shared.streamer.copies(self.layer, choice.copied):
            at = np.full(len(counts), -1)
            at[some] = np.arange(len(some))
            add(buffer.stack, at, int(counts[some].sum()))
        self._move()
        return routed.sum()

    # -- decisions

    def _choose(self, ids: Tensor) -> Choice:
        """How the experts that these tokens have chosen are served."""
        self._choice.choose(ids, self.set)
        self._count(*self._choice.found[:3].tolist())
        return self._choice

    def _count(self, resident: int, cpu: int, streamed: int) -> None:
        total = self.shared.counters
        total.resident += resident
        total.cpu += cpu
        total.streamed += streamed

    def _move(self) -> None:
        """Now and then let an expert that is chosen more often take the place of a resident one. Nothing waits for the
        copy but what is launched from now on."""
        self._steps += 1
        wanted = self.set.exchange() if self.shared.placement == AUTO and self._steps % TURN == 0 else None
        if wanted is None:
            return
        expert, slot = wanted
        self._set_slot(self.set.replace(slot, expert), self.slots.stack.size)
        self.shared.streamer.replace(self.slots, slot, self.layer, expert)
        self._set_slot(expert, slot)
        if self.on_gpu:
            self._in_slot[slot : slot + 1].fill_(expert)
        self.shared.counters.loaded += 1

    def _set_slot(self, expert: int, slot: int) -> None:
        if self.on_gpu:
            number = self.local_experts.first + expert
            self._slot[number : number + 1].fill_(slot)

    def _numbers(self, at: np.ndarray, none: int) -> np.ndarray:
        """[experts of the router] int32: each one's index; `none` where it has none or is another rank's."""
        found = np.full(self.local_experts.total, none, np.int32)
        found[self.local_experts.first : self.local_experts.first + self.local_experts.size] = np.where(
            at < 0, none, at
        )
        return found


def _each(biases: Biases, change: Callable[[Tensor], Tensor]) -> Biases:
    return Biases(*(None if one is None else change(one) for one in biases))


@dataclass
class Pending:
    """State that `begin` hands to `finish`."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    view: HostView | None = None
    small_batch: SmallBatch | None = None
    made: Tensor | None = None  # by resident experts

    def __len__(self) -> int:
        return len(self.x)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.ids, self.weights
