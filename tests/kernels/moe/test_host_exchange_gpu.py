"""Exchange of a step on a GPU and the host, compared with torch: tokens, lists, experts, slots and sums."""

import time

import pytest
import torch
from phalanx.kernels import host_memory, jit
from phalanx.kernels.moe import host_exchange, nibble_permutation
from phalanx.kernels.moe.host_exchange import Exchange, Made, Part, Slots
from phalanx.kernels.moe.nibble_permutation import Permutation

from ...devices import require_gpu
from ..gpu import poison  # noqa: F401

require_gpu()

EXPERTS, ROUTER, FIRST, K, HIDDEN, MAX_LISTED, SLOTS = 24, 64, 8, 4, 256, 16, 6
NONE = SLOTS + 3  # behind slots that experts never leave
WIDTHS = 48, 4096 * 3 + 16  # bytes of an expert


def pinned(*shape, dtype=torch.uint8):
    return host_memory.zeros(shape, dtype, pin=True)


def room(tokens, dtype):
    """For x, ids and weights on the host."""
    kinds = (HIDDEN, dtype), (K, torch.int32), (K, torch.float32)
    return [pinned(tokens, width, dtype=one) for width, one in kinds]


class Pair:
    """Both sides of one layer, and what torch makes of the same."""

    def __init__(self, dtype):
        self.dtype, self.exchange, self.count = dtype, Exchange(torch.device("cuda")), 0
        self.there = [pinned(EXPERTS, width) for width in WIDTHS]
        for one in self.there:
            one.random_(256)
        self.here = [torch.zeros(MAX_LISTED, width, dtype=torch.uint8, device="cuda") for width in WIDTHS]
        self.slots = [torch.zeros(SLOTS, width, dtype=torch.uint8, device="cuda") for width in WIDTHS]
        expert_in = torch.arange(SLOTS)
        table = torch.full((ROUTER,), NONE, dtype=torch.int32)
        table[FIRST : FIRST + SLOTS] = torch.arange(SLOTS, dtype=torch.int32)
        self.want_table, self.want_in, self.want_slots = table, expert_in, [x.cpu() for x in self.slots]
        cuda = torch.device("cuda")
        self.parts = host_exchange.table([Part(*both) for both in zip(self.there, self.here, strict=True)], cuda)
        adopting = [Part(*both) for both in zip(self.here, self.slots, strict=True)]
        assert host_exchange.adopts(adopting) and host_exchange.supports(cuda)
        self.of_slots = Slots(host_exchange.table(adopting, cuda), table.to(cuda), expert_in.to(cuda), NONE)

    def tell(self, experts, slots):
        flags = self.exchange.list
        for i, (expert, slot) in enumerate(zip(experts, slots, strict=True)):
            flags[1 + i] = expert | slot + 1 << 16
        flags[0] = self.count << 9 | len(experts)

    def adopt(self, experts, slots):
        for expert, slot in zip(experts, slots, strict=True):
            if slot < 0:
                continue
            self.want_table[FIRST + int(self.want_in[slot])] = NONE
            self.want_table[FIRST + expert], self.want_in[slot] = slot, expert
            for mine, theirs in zip(self.want_slots, self.there, strict=True):
                mine[slot] = theirs[expert]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_sides(dtype, late):
    """late: what the GPU waits for comes when it waits already, once all kernels are loaded: that waits for the GPU."""
    both, draw = Pair(dtype), torch.Generator().manual_seed(0)
    exchange = both.exchange
    for turn in range(12):
        tokens, found = (1, 3, 16)[turn % 3], (0, 1, 5, MAX_LISTED)[turn % 4]
        both.count += 1
        x = torch.randn(tokens, HIDDEN, generator=draw).to("cuda", dtype)
        ids = torch.stack([torch.randperm(ROUTER, generator=draw)[:K] for _ in range(tokens)]).int().cuda()
        weights = torch.rand(tokens, K, generator=draw).cuda()
        host = room(tokens, dtype)
        before = both.want_table.clone()
        numbers = host_exchange.send(x, ids, weights, both.of_slots.table, host, exchange)
        assert torch.equal(numbers.cpu(), before[ids.cpu().long()])
        assert int(exchange.sent[0]) == both.count
        assert all(torch.equal(a, b.cpu()) for a, b in zip(host, (x, ids, weights), strict=True))

        experts = torch.randperm(EXPERTS, generator=draw)[:found].tolist()
        local_experts = set(both.want_in.tolist())
        free = iter(torch.randperm(SLOTS, generator=draw).tolist())
        slots = [next(free, -1) if i % 2 and one not in local_experts else -1 for i, one in enumerate(experts)]
        later = late and turn > 0
        if not later:
            both.tell(experts, slots)
        made = pinned(tokens, HIDDEN, dtype=torch.float32)
        made.normal_(generator=draw)
        # Before `fetch`, which waits for the list: copies to the GPU and pinning wait for what is launched.
        parts = [torch.randn(tokens, HIDDEN, generator=draw).to("cuda", dtype) for _ in range(2)]
        fetched = host_exchange.fetch(both.parts, ids, MAX_LISTED, FIRST, exchange)
        if not later:
            exchange.made[0] = both.count
        y = host_exchange.collect(*parts, Made(made), x, exchange, fetched, both.of_slots, FIRST)
        if later:
            time.sleep(0.01)  # long enough for the kernel to look for the list
            both.tell(experts, slots)
            time.sleep(0.01)  # long enough for the other one to look for the sums
            exchange.made[0] = both.count
        torch.cuda.synchronize()

        want = torch.full((tokens, K), MAX_LISTED, dtype=torch.int32)
        for place, expert in enumerate(experts):
            want[ids.cpu() == FIRST + expert] = place
        assert torch.equal(fetched.numbers.cpu(), want) and fetched.found.tolist() == [found]
        assert fetched.of.tolist() == experts + [0] * (MAX_LISTED - found)
        assert fetched.slots.tolist() == slots + [-1] * (MAX_LISTED - found)
        for mine, theirs in zip(both.here, both.there, strict=True):
            assert torch.equal(mine[:found].cpu(), theirs[experts])
        total = parts[0].float() + parts[1].float() + made.cuda()
        torch.testing.assert_close(y, total.to(dtype), atol=2e-2, rtol=2e-2)
        both.adopt(experts, slots)
        assert torch.equal(both.of_slots.table.cpu(), both.want_table)
        assert torch.equal(both.of_slots.expert_in.cpu(), both.want_in)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(both.slots, both.want_slots, strict=True))


def permutation_of(size, made):
    """Nibbles anywhere, and bits that are flipped."""
    low, high = (torch.randint(0, 2 * size, (made,), dtype=torch.int32) for _ in range(2))
    return Permutation(low | high << 16, torch.randint(0, 256, (made,), dtype=torch.uint8), size)


def arriving():
    """Experts of three tensors: one as it is, one of many small units, and one of few large ones."""
    found = []
    for size, made, units in ((48, 48, 1), (2368, 2560, 77), (3648, 3456, 5)):
        there = pinned(EXPERTS, units * size)
        there.random_(256)
        permutation = permutation_of(size, made) if size > 48 else None
        want = (
            there if permutation is None else nibble_permutation.permute_reference(permutation, there).view(EXPERTS, -1)
        )
        here = torch.zeros(SLOTS, units * made, dtype=torch.uint8, device="cuda")
        on_gpu = permutation and Permutation(permutation.table.cuda(), permutation.flips.cuda(), size)
        found.append((Part(there, here, on_gpu), want))
    return found


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_comes_to_stay(dtype, late):
    """With or without an expert in the list. late: as above, and the list comes before the sums."""
    both, draw, cuda = Pair(dtype), torch.Generator().manual_seed(0), torch.device("cuda")
    exchange, parts = both.exchange, arriving()
    mine = [one for one, _ in parts]
    assert host_exchange.arrive(mine)
    slots = both.of_slots._replace(parts=host_exchange.table(mine, cuda))
    want_slots = [torch.zeros(one.here.shape, dtype=torch.uint8) for one in mine]
    for turn in range(12):
        tokens = (1, 3, 16)[turn % 3]
        both.count += 1
        x = torch.randn(tokens, HIDDEN, generator=draw).to("cuda", dtype)
        ids = torch.stack([torch.randperm(ROUTER, generator=draw)[:K] for _ in range(tokens)]).int().cuda()
        host_exchange.send(x, ids, torch.rand(tokens, K).cuda(), slots.table, room(tokens, dtype), exchange)
        entries = []
        if turn % 4 != 3:
            free = sorted(set(range(EXPERTS)) - set(both.want_in.tolist()))
            entries = [(free[turn % len(free)], turn * 5 % SLOTS)]
        experts, places = [one for one, _ in entries], [slot for _, slot in entries]
        made = pinned(tokens, HIDDEN, dtype=torch.float32)
        made.normal_(generator=draw)
        resident = torch.randn(tokens, HIDDEN, generator=draw).to("cuda", dtype)
        torch.cuda.synchronize()
        later = late and turn > 0
        if not later:
            both.tell(experts, places)
            exchange.made[0] = both.count
        if turn < 1:  # loading waits for the GPU, and copies wait for what is launched
            name = "host_exchange", "host_collect_only", dtype
            jit.kernel(*name, **host_exchange.sizes(resident, None, made))
        y = host_exchange.collect_only(resident, Made(made), x, exchange, slots, FIRST)
        if later:
            time.sleep(0.01)  # 10 ms, a thousand times what the kernel takes to begin to wait for the list
            both.tell(experts, places)
            time.sleep(0.01)  # 10 ms, by then it waits for the sums
            exchange.made[0] = both.count
        torch.cuda.synchronize()
        want = resident.float() + made.cuda()
        torch.testing.assert_close(y, want.to(dtype), atol=3e-2, rtol=2e-2)
        for expert, slot in entries:
            both.want_table[FIRST + int(both.want_in[slot])] = NONE
            both.want_table[FIRST + expert], both.want_in[slot] = slot, expert
            for slot_of_part, (_, repacked) in zip(want_slots, parts, strict=True):
                slot_of_part[slot] = repacked[expert]
        assert torch.equal(slots.table.cpu(), both.want_table) and torch.equal(slots.expert_in.cpu(), both.want_in)
        assert all(torch.equal(one.here.cpu(), want) for one, want in zip(mine, want_slots, strict=True))


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_that_come_a_layer_late(dtype, only):
    """Three layers a step: the first waits for nothing and adds nothing, the last one adds two layers' sums."""
    both, draw = Pair(dtype), torch.Generator().manual_seed(0)
    exchange, parts = both.exchange, [one for one, _ in arriving()]
    slots = both.of_slots._replace(parts=host_exchange.table(parts, torch.device("cuda")))
    turns = [pinned(3, HIDDEN, dtype=torch.float32) for _ in range(2)]
    hosts = [room(3, dtype) for _ in range(2)]
    for step in range(5):
        late = step > 0  # once kernels are loaded, which waits for the GPU
        got, want, before = [], [], torch.zeros(3, HIDDEN)
        for place in range(3):
            both.count += 1
            x, resident = (torch.randn(3, HIDDEN, generator=draw).to("cuda", dtype) for _ in range(2))
            ids = torch.stack([torch.randperm(ROUTER, generator=draw)[:K] for _ in range(3)]).int().cuda()
            weights = torch.rand(3, K).cuda()
            torch.cuda.synchronize()
            host_exchange.send(x, ids, weights, slots.table, hosts[place % 2], exchange)
            own, owed = turns[place % 2], turns[1 - place % 2]
            made = Made(own if place == 2 else None, owed if place else None)
            mine = torch.randn(3, HIDDEN, generator=draw)
            if not late:
                own.copy_(mine)
                both.tell([], [])
                exchange.made[0] = both.count
            if only:
                got.append(host_exchange.collect_only(resident, made, x, exchange, slots, FIRST))
            else:
                got.append(host_exchange.collect(resident, None, made, x, exchange))
            want.append(resident.float())
            if late and only:
                both.tell([], [])
            if place < 2:  # neither waits for what the CPU makes of this layer
                torch.cuda.synchronize()
            if late:
                own.copy_(mine)
                exchange.made[0] = both.count
            for sums, added in ((before, place > 0), (mine, place == 2)):
                want[place] += sums.cuda() if added else 0
            before = mine
        torch.cuda.synchronize()
        for y, sums in zip(got, want, strict=True):
            torch.testing.assert_close(y, sums.to(dtype), atol=3e-2, rtol=3e-2)


def test_who_is_given_up_waits_no_more():
    both = Pair(torch.bfloat16)
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device="cuda")
    ids, weights = torch.zeros(1, K, dtype=torch.int32, device="cuda"), torch.zeros(1, K, device="cuda")
    host, made = room(1, x.dtype), pinned(1, HIDDEN, dtype=torch.float32)
    # Loading waits for the GPU.
    jit.kernel("host_exchange", "host_collect", x.dtype, **host_exchange.sizes(None, x, made))
    both.count += 1
    host_exchange.send(x, ids, weights, both.of_slots.table, host, both.exchange)
    fetched = host_exchange.fetch(both.parts, ids, MAX_LISTED, FIRST, both.exchange)
    host_exchange.collect(None, x, Made(made), x, both.exchange, fetched, both.of_slots, FIRST)
    both.exchange.service.give_up()
    torch.cuda.synchronize()
    assert fetched.found.tolist() == [0] and both.of_slots.expert_in.tolist() == list(range(SLOTS))
