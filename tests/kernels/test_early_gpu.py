"""Kernels of a decode step that begin before what is before them has ended, beside the same with a pause after each."""

from functools import partial

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.attention import decode
from phalanx.kernels.attention.attention import AttentionParams
from phalanx.kernels.embedding import embedding
from phalanx.kernels.gemm.linear import linear
from phalanx.kernels.norm import norm
from phalanx.kernels.rope import rope
from phalanx.kernels.rope.rope import CurrentKV
from phalanx.kernels.sampling import decode_inputs

from ..devices import needs_tma, require_gpu
from .gpu import run_steps

require_gpu()
pytestmark = needs_tma
HEADS, KV_HEADS, DIM, SIZE, LAYERS, STEPS, VOCABULARY = 8, 2, 128, 16, 3, 30, 64
HIDDEN, BLOCKS, LONGEST = HEADS * DIM, 300, 2400
WIDTH = 16000  # of block tables: what copies them lasts longer than kernels take to start


class Step:
    """A step of `rows` sequences: everything that a step is given changes from one to the next, as do most lengths."""

    def __init__(self, rows: int):
        made = partial(torch.randn, device="cuda", dtype=torch.float16)
        self.rows = rows
        self.table, self.turns = made(VOCABULARY, HIDDEN), torch.rand(LONGEST, 2, DIM // 2, device="cuda")
        self.norm = made(HIDDEN)
        self.qkv = made(LAYERS, (HEADS + 2 * KV_HEADS) * DIM, HIDDEN) / 32
        self.out = made(LAYERS, HIDDEN, HIDDEN) / 32
        self.keys = made(LAYERS, 2, BLOCKS, SIZE, KV_HEADS, DIM)
        head = torch.tensor([rows], dtype=torch.int32)
        held, blocks = torch.zeros(rows), torch.full((rows,), WIDTH)  # all tables are sent in every step
        self.given = []
        for i in range(STEPS):
            ids, positions = torch.randint(VOCABULARY, (rows,)), torch.randint(LONGEST, (rows,))
            # No row reads or writes where another one writes, but where one has written the step before.
            written, others = torch.arange(BLOCKS).roll(i % 2 * rows).split([rows, BLOCKS - rows])
            tables = others[torch.randint(BLOCKS - rows, (rows, WIDTH))]
            tables[torch.arange(rows), positions // SIZE] = written
            shift = torch.zeros(rows)
            columns = [torch.arange(rows), ids, positions, held, blocks, blocks.cumsum(0) - blocks, shift]
            assert len(columns) == decode_inputs.num_columns(1)
            parts = [head, *columns, tables.flatten()]
            self.given.append(torch.cat([part.int() for part in parts]).cuda())
        self.sent = self.given[0].clone()
        self.last = torch.zeros(rows, 1, dtype=torch.int64, device="cuda")
        self.inputs = decode_inputs.empty(rows, WIDTH, torch.device("cuda"))
        self.state_tables = torch.zeros(rows, WIDTH, dtype=torch.int32, device="cuda")
        self.ids, self.positions, self.slots, _, self.lengths, self.tables = self.inputs
        self.found = torch.zeros(rows, HIDDEN, device="cuda", dtype=torch.float16)

    def __call__(self, caches, pause):
        decode_inputs.decode_inputs(self.sent, self.state_tables, self.last, self.inputs, self.rows, SIZE)
        pause()
        residual = embedding.embedding(self.ids, self.table)
        pause()
        turn = rope.cos_sin(self.turns, self.positions)
        pause()
        x = None
        for qkv, out, cache in zip(self.qkv, self.out, caches, strict=True):
            if x is None:
                x = norm.rms_norm(residual, self.norm, 1e-5)
            else:
                x, residual = norm.add_rms_norm(x, residual, self.norm, 1e-5)
            pause()
            made = linear(x, qkv)
            pause()
            q, k, v = made.view(self.rows, -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
            seen = torch.empty(self.rows, HEADS, DIM, device="cuda", dtype=torch.float16)
            newest = CurrentKV(k, v, turn, None, self.slots)
            of_step = cache[0], cache[1], self.tables, self.lengths, seen
            decode.decode(self.rows, q, *of_step, *AttentionParams(DIM**-0.5), newest)
            pause()
            x = linear(seen.flatten(1), out)
            pause()
        self.found.copy_(x)


@pytest.mark.parametrize("rows", [1, 2, 5, 40, 64])
def test_steps_as_graphs(rows):
    torch.manual_seed(rows)
    step, stream = Step(rows), torch.cuda.Stream()

    run = partial(run_steps, step, step.sent, step.keys)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        want = run(torch.cuda.synchronize, False)
        assert want[0].isfinite().all()
        for _ in range(3):
            assert all(map(torch.equal, run(lambda: None, True), want))
        assert all(map(torch.equal, run(lambda: None, False), want)), "launched one by one"
        assert not jit.counters(step.sent.device, stream.cuda_stream).any()
