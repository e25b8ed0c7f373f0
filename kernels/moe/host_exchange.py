"""Between a step on a GPU and the host while the step runs: tokens and choices one way, experts and sums the other.

Kernels read and write pinned memory (host_exchange.cu), and both sides look at flags there. So a small-batch step
costs no launch and no event between two layers: the GPU waits in `fetch` for the host's choice and in `collect` for
the CPU's part, and the host for what `send` brings (host_service.py).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import host_memory, jit
from .host_service import LIMIT, Service
from .nibble_permutation import Permutation

THREADS = 256  # of a block
BLOCKS = 32  # that read host memory at once: half a megabyte under way, where PCIe takes a tenth of it; more are slower
ADOPTING = 64  # blocks that copy experts into their slots
BRINGING = 64  # that bring experts from the host to their slots, a quarter or half of a megabyte under way
MAX_LISTED = THREADS  # experts of a list
UNIT = 8 << 10  # bytes that a block of `collect_only` makes over at once, and the most of a unit
ADDED = "RESIDENT", "COPIED", "OWN", "OWED"  # what resident and copied experts make, and `Made`
LINE = 32  # int32 of two cache lines: flags do not share one


class Part(NamedTuple):
    """One tensor of experts in two places."""

    there: Tensor  # [n, ...]
    here: Tensor  # [m, ...]
    permutation: Permutation | None = None  # how one becomes the other; None: they are the same


class Exchange:
    """The exchange of one rank with a GPU: layers use it one after the other."""

    def __init__(self, device: torch.device):
        self._flags = host_memory.zeros((2 * LINE + 1 + MAX_LISTED,), torch.int32, pin=True)
        host_memory.check_pinned("experts in host memory", [self._flags])
        self.sent, self.made, self.list = self._flags[:LINE], self._flags[LINE : 2 * LINE], self._flags[2 * LINE :]
        self.state = torch.zeros(5, dtype=torch.int32, device=device)
        self.service = Service(self.sent, self.made, self.list)


class Fetched(NamedTuple):
    """Experts that `fetch` has brought."""

    numbers: Tensor  # int32 [T, k] the place of each routed token's expert, or `most`
    found: Tensor  # int32 [1] how many
    of: Tensor  # int64 [most] which
    slots: Tensor  # int32 [most] that they are to have; -1: none


class Made(NamedTuple):
    """The CPU's sums that a layer adds, [T, H] f32 in pinned memory."""

    own: Tensor | None  # this layer's, which it waits for; None: the next one adds them
    owed: Tensor | None = None  # those of the layer before


class Slots(NamedTuple):
    """Slots into which `collect` puts experts that become resident."""

    parts: Tensor  # `table` of what has been copied and of the slots; for `collect_only` of the host's
    table: Tensor  # int32 [experts of the router] each one's slot, or `none`
    expert_in: Tensor  # int64 [slots]
    none: int  # slots, with those that experts never leave: these are the last ones, of which nothing here knows


def supports(device: torch.device) -> bool:
    """Whether kernels there reach pinned memory by its address on the host. Not where launches wait for kernels, as
    `collect` would wait for what comes after its launch."""
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"
    return device.type == "cuda" and not blocking and host_memory.in_reach(device)


def takes(parts: Sequence[Part]) -> bool:
    """Whether `fetch` copies these."""
    return all(len(part.here) <= MAX_LISTED and len(part.there) < 1 << 16 for part in parts) and all(
        part.there.is_pinned() and part.there.is_contiguous() and part.there[0].nbytes % 16 == 0 == x.data_ptr() % 16
        for part in parts
        for x in part[:2]
    )


def adopts(parts: Sequence[Part]) -> bool:
    """Whether `collect` copies these, on the device."""
    return all(
        x.is_contiguous() and 0 < len(x) < 1 << 15 and x[0].nbytes % 16 == 0 == x.data_ptr() % 16
        for part in parts
        for x in part[:2]
    )


def arrive(parts: Sequence[Part]) -> bool:
    """Whether `collect_only` brings these."""
    if not takes([one._replace(here=one.here[:MAX_LISTED]) for one in parts]) or not adopts(
        [Part(one.here, one.here) for one in parts]
    ):
        return False
    permutation = [one.permutation for one in parts if one.permutation is not None]
    small = all(one.there[0].nbytes < 1 << 31 for one in parts)
    return small and all(one.size <= UNIT and one.size % 16 == 0 == len(one.table) % 16 for one in permutation)


def table(parts: Sequence[Part], device: torch.device) -> Tensor:
    """Parts as kernels read them: struct Part of host_exchange.cu."""
    rows = []
    for there, here, permutation in parts:
        rows.append([there.data_ptr(), there[0].nbytes, here.data_ptr(), here[0].nbytes, 0, 0, 0, 0])
        if permutation is not None:
            moved = permutation.table.data_ptr(), permutation.flips.data_ptr()
            rows[-1][4:] = *moved, permutation.size, len(permutation.table)
    return torch.tensor(rows, dtype=torch.int64).to(device)


def send(x: Tensor, ids: Tensor, weights: Tensor, slots: Tensor, host: Sequence[Tensor], exchange: Exchange) -> Tensor:
    """To the host's x, ids and weights, which the service waits for. x [T, H], whose rows have a multiple of 16 bytes;
    all contiguous. slots int32 [experts of the router]. Returns slots[ids]."""
    numbers, units = torch.empty_like(ids), x.nbytes // 16
    blocks = max(1, min(BLOCKS, units // THREADS))
    kernel = jit.kernel("host_exchange", "host_send", x.dtype, **sizes())
    where = x, ids, weights, slots, *host, numbers, exchange.state, exchange.sent
    kernel((blocks, 1, 1), THREADS, *where, units, ids.numel())
    return numbers


def fetch(parts: Tensor, ids: Tensor, most: int, first: int, exchange: Exchange) -> Fetched:
    """Bring the experts that the service has chosen, `most` at most; waits for the choice."""
    numbers = torch.empty_like(ids)
    count, of, slots = ids.new_empty(1), ids.new_empty(most, dtype=torch.int64), ids.new_empty(most)
    kernel = jit.kernel("host_exchange", "host_fetch", torch.float32, **sizes())
    where = exchange.list, exchange.state, exchange.made[1:], parts, ids, count, of, slots, numbers
    kernel((BLOCKS, 1, 1), THREADS, *where, len(parts), ids.numel(), most, first)
    return Fetched(numbers, count, of, slots)


def collect(
    resident: Tensor | None, copied: Tensor | None, made: Made, like: Tensor, exchange: Exchange,
    fetched: Fetched | None = None, slots: Slots | None = None, first: int = 0,
) -> Tensor:  # fmt: skip
    """The sum of resident experts, copied ones and the CPU's: like `like`. Waits until the service has
    computed what is added. What was fetched for slots goes there."""
    y = torch.empty_like(like)
    added = resident, copied, *made
    kernel = jit.kernel("host_exchange", "host_collect", like.dtype, **sizes(*added))
    args = (*(y if one is None else one for one in added), y)
    blocks, adopted = -(-y.numel() // (4 * THREADS)), (y, y, y, y, y, y, 0, 0, 0)
    if fetched is not None and slots is not None:
        blocks += ADOPTING
        of_slots = slots.parts, slots.table, slots.expert_in, len(slots.parts), first, slots.none
        adopted = fetched.found, fetched.slots, fetched.of, *of_slots
    kernel((blocks, 1, 1), THREADS, *args, exchange.state, exchange.made, exchange.sent[1:], y.numel(), *adopted)
    return y


def collect_only(
    resident: Tensor, made: Made, like: Tensor, exchange: Exchange, slots: Slots, first: int = 0
) -> Tensor:
    """`collect` where nothing was fetched: the list has one expert at most, which comes to its slot."""
    y = torch.empty_like(like)
    kernel = jit.kernel("host_exchange", "host_collect_only", like.dtype, **sizes(resident, None, *made))
    blocks = -(-y.numel() // (4 * THREADS)) + BRINGING
    of_slots = slots.parts, slots.table, slots.expert_in, len(slots.parts), first, slots.none
    added = resident, *(y if one is None else one for one in made), y
    where = *added, exchange.state, exchange.made, exchange.list
    kernel((blocks, 1, 1), THREADS, *where, y.numel(), *of_slots)
    return y


def sizes(*added: Tensor | None) -> dict[str, int]:
    """Compile-time constants of host_exchange.cu. added: what `collect` adds up, as ADDED has it."""
    there = {name: int(one is not None) for name, one in itertools.zip_longest(ADDED, added)}
    return dict(THREADS=THREADS, UNIT=UNIT, LIMIT_S=int(LIMIT), **there)
