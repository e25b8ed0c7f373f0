"""What captured decode steps are given, against the batches of other steps."""

import random

import numpy as np
import pytest
import torch
from phalanx.kernels.sampling import decode_inputs
from phalanx.rank import protocol
from phalanx.rank.worker import decode_batch as module
from phalanx.rank.worker.batch_builder import build_batches
from phalanx.rank.worker.decode_batch import DeviceDecodeBatch, HostDecodeBatch
from phalanx.rank.worker.state import BatchState
from phalanx.rank.worker.upload import Upload

ROWS, LENGTH, BLOCK = 6, 64, 4
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


class HostUpload:
    """Copies to a device's memory that is the host's; keeps how much was sent."""

    def fill(self, target, parts):
        sent = torch.from_numpy(np.concatenate(parts))
        target[: len(sent)] = sent
        self.sent = len(sent)


class Life:
    """Sequences that come, grow and go as plans tell it."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.state = BatchState(ROWS, LENGTH, BLOCK)
        self.free = list(range(500))
        self.draw.shuffle(self.free)

    def enter(self, row):
        count = self.draw.randint(1, 40)
        blocks = [self.free.pop() for _ in range(-(-(count + 1) // BLOCK))]
        tokens = protocol.pack_u32([self.draw.randrange(1000) for _ in range(count)])
        sampling = protocol.SamplingParams(max_tokens=1)
        done = count - 1 if self.draw.random() < 0.5 else count  # or its newest token was sampled
        new = protocol.NewSequence(row, tokens, count, done, protocol.pack_u32(blocks), sampling)
        self.state.apply(protocol.Plan(step=0, new=[new]))
        self.state.length[row] += done == count

    def decode(self, rows):
        """A step of these rows, which get the blocks that it needs."""
        need = [row for row in rows if self.state.computed[row] == self.state.num_blocks[row] * BLOCK]
        ids = protocol.pack_u32([self.free.pop() for _ in need])
        return self.state.apply(
            protocol.Plan(step=0, rows=protocol.pack_u16(rows), block_rows=protocol.pack_u16(need), block_ids=ids)
        )


def check(inputs, want, n, size):
    for name in ("ids", "positions", "slots", "lengths"):
        assert getattr(inputs, name)[:n].tolist() == getattr(want, name).tolist(), name
    for mine, other, length in zip(inputs.tables.tolist(), want.block_tables.tolist(), want.kv_lens, strict=False):
        assert mine[: -(-length // BLOCK)] == other[: -(-length // BLOCK)]
    assert all((getattr(inputs, name)[n:size] == -1).all() for name in ("ids", "slots"))
    assert not inputs.lengths[n:size].any() and not inputs.positions[n:size].any()


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("seed", range(8))
def test_captured_steps_read_what_other_steps_read(device, seed, monkeypatch):
    """Rows take part in some steps and miss others, of which some are no captured ones, and change hands."""
    if device == "cpu":
        monkeypatch.setattr(module, "decode_inputs", decode_inputs.decode_inputs_reference)
    life, last = Life(seed), torch.arange(ROWS, device=device) + 2000
    upload = HostUpload() if device == "cpu" else Upload(torch.device(device))
    captured = DeviceDecodeBatch(life.state, last, [], ROWS, upload)
    on_host = HostDecodeBatch(life.state, last.cpu(), [], ROWS)
    for row in range(ROWS):
        life.enter(row)
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


def test_a_block_is_sent_once():
    life, last, upload = Life(0), torch.zeros(ROWS, dtype=torch.int64), HostUpload()
    captured = DeviceDecodeBatch(life.state, last, [], ROWS, upload)
    life.enter(0)
    life.enter(1)
    known = int(life.state.num_blocks[:2].sum())
    sent = []
    for _ in range(2 * BLOCK):
        captured.send(life.decode([0, 1]))
        sent.append(upload.sent - 1 - 2 * decode_inputs.COLUMNS)
    assert sum(sent) == life.state.num_blocks[:2].sum() and sent[0] >= known and sent.count(0) >= BLOCK


def test_the_batch_has_the_captured_tensors():
    captured = HostDecodeBatch(BatchState(ROWS, LENGTH, BLOCK), torch.zeros(ROWS, dtype=torch.int64), ["caches"], 4)
    batch = captured.batch(3, [64] * 3)
    assert batch.ids.data_ptr() == captured.inputs.ids.data_ptr() and batch.caches == ["caches"]
    assert (batch.num_decodes, batch.query_lens, batch.kv_lens) == (3, [1] * 3, [64] * 3)
    assert batch.query_starts.tolist() == [0, 1, 2, 3] and batch.block_tables.shape == (3, LENGTH // BLOCK)
    assert len(batch.sample_at) == 0
