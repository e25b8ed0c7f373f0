"""Inputs of captured decode steps, against the batches of other steps."""

import random

import numpy as np
import pytest
import torch
from phalanx.kernels.sampling import decode_inputs
from phalanx.rank import protocol
from phalanx.rank.cache_groups import ONE_GROUP, CacheGroup
from phalanx.rank.model.vision.qwen2_5_vl import positions
from phalanx.rank.worker import decode_batch as module
from phalanx.rank.worker.batch_builder import build_batches
from phalanx.rank.worker.decode_batch import DeviceDecodeBatch, HostDecodeBatch
from phalanx.rank.worker.state import BatchState
from phalanx.rank.worker.upload import Upload

ROWS, LENGTH, BLOCK = 6, 64, 4
POOL = 900  # blocks
TWO_GROUPS = CacheGroup(0, 3), CacheGroup(8, 1)
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


class HostUpload:
    """Copies to a device's memory that is the host's; keeps how much was sent."""

    def fill(self, target, parts):
        sent = torch.from_numpy(np.concatenate(parts))
        target[: len(sent)] = sent
        self.sent = len(sent)


class Life:
    """Sequences that come, grow and go as plans tell it."""

    def __init__(self, seed, groups=ONE_GROUP):
        self.draw = random.Random(seed)
        self.groups = groups
        self.state = BatchState(ROWS, LENGTH, BLOCK, groups, range(len(groups)), POOL)
        self.state.image_positions = positions
        self.free = list(range(POOL))
        self.draw.shuffle(self.free)

    def taken(self, count):
        return protocol.pack_u32([self.free.pop() for _ in range(count)])

    def enter(self, row):
        count = self.draw.randint(1, 40)
        blocks = [self.taken(-(-(count + 1) // (group.entries * BLOCK))) for group in self.groups]
        tokens = protocol.pack_u32([self.draw.randrange(1000) for _ in range(count)])
        sampling = protocol.SamplingParams(max_tokens=1)
        done = count - 1 if self.draw.random() < 0.5 else count  # or its newest token was sampled
        shown = [protocol.Picture(b"", 3, 6, 2, 3)] if count > 12 and self.draw.random() < 0.5 else []
        new = protocol.NewSequence(
            row, tokens, count, done, blocks[0], sampling, further_blocks=blocks[1:], pictures=shown
        )
        self.state.apply(protocol.Plan(step=0, new=[new]))
        self.state.length[row] += done == count

    def decode(self, rows):
        """A step of these rows, which get the blocks that it needs."""
        need = [
            g * ROWS + row
            for g in range(len(self.groups))
            for row in rows
            if self.state.computed[row] == self.state.num_blocks[g * ROWS + row] * BLOCK
        ]
        ids = self.taken(len(need))
        return self.state.apply(
            protocol.Plan(step=0, rows=protocol.pack_u16(rows), block_rows=protocol.pack_u16(need), block_ids=ids)
        )


def check(inputs, want, n, size):
    for of_group, batch in zip(inputs, (want, *want.further), strict=True):
        assert of_group.slots[:n].tolist() == batch.slots.tolist()
        for mine, other, length in zip(
            of_group.tables.tolist(), batch.block_tables.tolist(), want.kv_lens, strict=False
        ):
            assert mine[: -(-length // BLOCK)] == other[: -(-length // BLOCK)]
    for name in ("ids", "positions", "lengths"):
        assert getattr(inputs[0], name)[:n].tolist() == getattr(want, name).tolist(), name
    assert all((x[n:size] == -1).all() for x in (inputs[0].ids, *(one.slots for one in inputs)))
    assert not inputs[0].lengths[n:size].any() and not inputs[0].positions[n:size].any()


@pytest.mark.parametrize("groups", [ONE_GROUP, TWO_GROUPS], ids=["one group", "two groups"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("seed", range(8))
def test_captured_steps_read_what_other_steps_read(device, seed, groups, monkeypatch):
    """Rows take part in some steps and miss others, of which some are no captured ones, and change hands."""
    if device == "cpu":
        monkeypatch.setattr(module, "decode_inputs", decode_inputs.decode_inputs_reference)
    life, last = Life(seed, groups), torch.arange(ROWS, device=device)[:, None] + 2000
    upload = HostUpload() if device == "cpu" else Upload(torch.device(device))
    captured = DeviceDecodeBatch(life.state, last, [], ROWS, upload)
    on_host = HostDecodeBatch(life.state, last.cpu(), [], ROWS)
    for row in range(ROWS):
        life.enter(row)
    assert life.state.shift.any()
    for _ in range(60):
        fits = [row for row in range(ROWS) if life.state.length[row] < LENGTH]
        rows = life.draw.sample(fits, life.draw.randint(1, len(fits)))
        scheduled, n = life.decode(rows), len(rows)
        (want,), _ = build_batches(life.state, scheduled, last, [], Upload(torch.device(device)))
        if life.draw.random() < 0.7:
            size = life.draw.randint(n, ROWS)
            assert captured.send(scheduled).tolist() == rows
            captured.fill(size)
            check(captured.inputs, want, n, size)
        on_host.fill(scheduled)
        check(on_host.inputs, want, n, n)
        for row in range(ROWS):
            if life.state.length[row] == LENGTH or life.draw.random() < 0.1:
                life.enter(row)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_drafts_of_the_ranks_and_of_the_plan(device, monkeypatch):
    """Any token stands in a row that has no draft."""
    if device == "cpu":
        monkeypatch.setattr(module, "decode_inputs", decode_inputs.decode_inputs_reference)
    life, last = Life(0), torch.arange(3 * ROWS, device=device).view(ROWS, 3) + 2000
    upload = HostUpload() if device == "cpu" else Upload(torch.device(device))
    for row in range(3):
        life.enter(row)
        life.state.length[row] = life.state.known[row] + 1
        life.state.computed[row] = life.state.known[row]
    rows, made, none = [2, 0, 1], protocol.MADE, protocol.NO_DRAFT
    plan = protocol.Plan(
        0, protocol.pack_u16(rows), query_len=3, drafts=protocol.pack_i32([made, made, 7, none, made, 8])
    )
    scheduled = life.state.apply(plan)
    want = [2006, 2007, 2008, 2000, 7, 0, 2003, 2004, 8]
    (batch,), _ = build_batches(life.state, scheduled, last, [], Upload(torch.device(device)))
    captured = DeviceDecodeBatch(life.state, last, [], ROWS, upload, 3)
    captured.send(scheduled)
    captured.fill(4)
    on_host = HostDecodeBatch(life.state, last.cpu(), [], ROWS, 3)
    on_host.fill(scheduled)
    found = [batch.ids, captured.inputs[0].ids[:9], on_host.inputs[0].ids[:9]]
    assert [ids.tolist() for ids in found] == [want] * 3


def test_entries_of_one_block_lie_a_pool_apart():
    life = Life(0, TWO_GROUPS)
    life.enter(2)
    whole, window = life.state.table[2], life.state.table[ROWS + 2]
    count = int(life.state.num_blocks[2])
    assert count % 3 == 0 and count >= life.state.num_blocks[ROWS + 2] > 0
    assert all((whole[i : i + 3] - whole[i] == [0, POOL, 2 * POOL]).all() for i in range(0, count, 3))
    assert window.max() < POOL


def test_a_block_is_sent_once():
    life, last, upload = Life(0), torch.zeros(ROWS, 1, dtype=torch.int64), HostUpload()
    captured = DeviceDecodeBatch(life.state, last, [], ROWS, upload)
    life.enter(0)
    life.enter(1)
    known = int(life.state.num_blocks[:2].sum())
    sent = []
    for _ in range(2 * BLOCK):
        captured.send(life.decode([0, 1]))
        sent.append(upload.sent - 1 - 2 * decode_inputs.num_columns(1))
    assert sum(sent) == life.state.num_blocks[:2].sum() and sent[0] >= known and sent.count(0) >= BLOCK


def test_the_batch_has_the_captured_tensors():
    state = BatchState(ROWS, LENGTH, BLOCK, TWO_GROUPS, [1, 0], POOL)
    captured = HostDecodeBatch(state, torch.zeros(ROWS, 1, dtype=torch.int64), ["caches"], 4)
    batch = captured.batch(3, [64] * 3)
    assert batch.ids.data_ptr() == captured.inputs[0].ids.data_ptr() and batch.caches == ["caches"]
    assert (batch.num_decodes, batch.query_lens, batch.kv_lens) == (3, [1] * 3, [64] * 3)
    assert batch.query_starts.tolist() == [0, 1, 2, 3] and batch.block_tables.shape == (3, 18)  # of whole blocks
    assert batch.of_layer(1) is batch and batch.of_layer(0).slots.data_ptr() == captured.inputs[1].slots.data_ptr()
    assert batch.of_layer(0).block_tables.data_ptr() == captured.inputs[1].tables.data_ptr()
    assert len(batch.sample_at) == 0
