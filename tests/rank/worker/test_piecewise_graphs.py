"""Steps with prompts that are replayed in pieces, beside the same steps launched kernel by kernel.

On a CPU a replay computes the captured function again, with all its padding: what is copied, padded and left to
attention is tested, but not CUDA's graphs.
"""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels import segmented_graph
from phalanx.kernels.cpp import ops
from phalanx.kernels.segmented_graph import Borrowed, SegmentedGraph, on_host
from phalanx.rank.model import batch as batch_module
from phalanx.rank.model.cache_spec import cache_dtype
from phalanx.rank.model.load import load
from phalanx.rank.worker import kv_cache
from phalanx.rank.worker import piecewise_graphs as module
from phalanx.rank.worker.batch_builder import build_batches
from phalanx.rank.worker.model_runner import step_stream
from phalanx.rank.worker.state import BatchState, ScheduledBatch
from phalanx.rank.worker.upload import Upload

from ...checkpoints import make_checkpoint
from ..model import test_architectures

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
pytestmark = pytest.mark.skipif(not GPU and not ops.available(), reason="no C++ compiler that works")
BLOCK, LENGTH, MAX_NUM_SEQS = 16, 96, 6
# rows, tokens computed before, tokens of the step, whether the step ends with the row's last known token
STEPS = [
    ([0], [0], [20], [True]),
    ([0, 1], [20, 0], [1, 30], [True, True]),
    ([0, 1, 2], [21, 30, 0], [1, 1, 40], [True, True, False]),  # a chunk of a prompt
    ([0, 2], [22, 40], [1, 23], [True, True]),
    ([3], [0], [3], [False]),  # nothing is sampled
    ([0, 1, 2, 3, 4], [23, 31, 63, 3, 0], [1, 1, 1, 61, 64], [True] * 5),
]


@pytest.fixture(autouse=True)
def no_gradients():
    stream = torch.cuda.current_stream() if GPU else None
    with torch.no_grad():
        yield
    if stream is not None:
        torch.cuda.set_stream(stream)


class Again:
    """A SegmentedGraph on a CPU."""

    tokens = 0

    def __init__(self, pool):
        pass

    def capture(self, function):
        self.function, self.result = function, function().clone()
        return self.result

    def replay(self, tokens):
        Again.tokens = tokens
        self.result.copy_(self.function())


@pytest.fixture
def on_cpu(monkeypatch):
    if GPU:
        return
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(module, "SegmentedGraph", Again)
    monkeypatch.setattr(batch_module, "on_host", lambda function, tokens: function(Again.tokens))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


class Rank:
    def __init__(self, comm, path, kept="auto", tokens=160, **options):
        if GPU:
            torch.cuda.set_stream(step_stream(DEVICE))  # the default one cannot be captured
        self.mesh = mesh.build(comm, comm.size, 1)
        self.model = model = load(path, self.mesh, device=DEVICE, **options)
        self.rows = BatchState(MAX_NUM_SEQS, LENGTH, BLOCK)
        order = np.random.default_rng(0).permutation(self.rows.table.size)
        self.rows.table[:] = order.reshape(self.rows.table.shape)
        draw = np.random.default_rng(1)
        for row in range(MAX_NUM_SEQS):
            self.rows.tokens[row] = draw.integers(0, model.vocab_size, LENGTH)
        self.rows.known[:] = 64, 64, 64, 64, 64, 0
        self.last = (torch.arange(MAX_NUM_SEQS)[:, None] * 7 + 1).to(DEVICE)
        specs, dtype = model.cache_specs(), cache_dtype(kept, model.dtype)
        blocks = self.rows.table.size
        of = specs, blocks, BLOCK, dtype, DEVICE, MAX_NUM_SEQS
        self.replayed, self.plain = kv_cache.allocate(*of), kv_cache.allocate(*of)
        upload = self.upload = Upload(DEVICE)
        self.graphs = module.PiecewiseGraphs(model, self.rows, self.last, self.replayed, upload, tokens, 0)
        self.graphs.capture(self.mesh.tensor, lambda done: None)

    def step(self, rows, starts, counts, samples, query_len=1):
        """One step in both ways: how far the sampled rows and the caches differ. NaN where either has one."""
        columns = map(np.array, (rows, starts, counts, samples))
        work = ScheduledBatch(*columns, np.zeros(len(rows), np.int64), query_len)
        assert self.graphs.supports(work)
        (batch,), chosen = build_batches(self.rows, work, self.last, self.plain, self.upload)
        want = self.model.forward([batch])[batch.sample_at]
        for (
            out
        ) in self.graphs._replayed._outs.values():  # rows that fill the step up: nobody reads what becomes of them
            out.fill_(torch.nan)
        got, of, same = self.graphs.replay(work)
        got = got[of.sample_at]
        assert torch.equal(same, chosen) and got.shape == want.shape
        pairs = [pair for layers in zip(self.replayed, self.plain, strict=True) for pair in zip(*layers, strict=True)]
        pairs += [(got, want)] * (len(got) > 0)
        return float(torch.stack([(a.float() - b.float()).abs().max() for a, b in pairs]).max())


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(module.PiecewiseGraphs, "_pays", lambda self, size, group: True)


MODELS = {
    "llama": dict(),
    "windows": dict(model_type="qwen3", use_sliding_window=True, sliding_window=5, max_window_layers=1),
}


@pytest.mark.parametrize("name", MODELS)
def test_replayed_steps_are_what_the_others_are(tmp_path, on_cpu, always, name):
    path = make_checkpoint(tmp_path, tokenizer=False, **MODELS[name])

    def run(comm):
        rank = Rank(comm, path)
        assert rank.graphs.most == 128 and not rank.graphs.supports(ScheduledBatch(*[np.array([129])] * 5))
        assert all(rank.step(*one) < 1e-4 for one in STEPS)
        several = [0, 1, 2], [3, 9, 0], [4, 4, 17], [True, True, True]
        assert rank.step(*several, query_len=4) < 1e-4  # tokens of the rows that decode, beside a prompt
        rank.graphs.close()

    threads.run(run, 1)


def test_a_cache_in_fp8(tmp_path, on_cpu, always):
    path = make_checkpoint(tmp_path, tokenizer=False, head_dim=64, **MODELS["windows"])

    def run(comm):
        rank = Rank(comm, path, kept="fp8", dtype="bf16")
        assert all(rank.step(*one) < 0.1 for one in STEPS[:4])

    threads.run(run, 1)


# Whose reference on a CPU takes no token without a slot.
LATENT = (
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm5_next",
    "glm_moe_dsa",
    "kimi_k25",
    "kimi_linear",
    "minicpm3",
    "minimax_m3_vl",
    "minimax_m3_vl_text",
    "mistral4",
)
HERE = {
    name: one
    for name, one in test_architectures.MODELS.items()
    if GPU or not {one["model_type"], one.get("text_config", {}).get("model_type")} & {*LATENT}
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", test_architectures.of_short(HERE, test_architectures.first_of_each_class(HERE)))
def test_every_architecture(tmp_path, on_cpu, always, name):
    path = test_architectures.write(tmp_path, **test_architectures.MODELS[name])

    def run(comm):
        rank = Rank(comm, path)
        assert all(rank.step(*one) < 1e-3 for one in STEPS)

    threads.run(run, 1)


def test_sizes_that_take_the_gpu_longer_are_not_captured(tmp_path, on_cpu, monkeypatch):
    asked = []
    monkeypatch.setattr(module.PiecewiseGraphs, "_pays", lambda self, size, group: asked.append(size) or size <= 96)
    path = make_checkpoint(tmp_path, tokenizer=False)

    def run(comm):
        graphs = Rank(comm, path).graphs
        assert {96, 128} <= set(asked) and graphs.most == 96 and sorted(graphs._captured) == [16, 32, 64, 96]
        works = [ScheduledBatch(*[np.array([count])] * 5) for count in (96, 97)]
        assert [graphs.supports(work) for work in works] == [True, False]

    threads.run(run, 1)


def test_what_cannot_be_captured_is_launched_kernel_by_kernel(tmp_path, on_cpu, always, monkeypatch, caplog):
    def refuse(self, function):
        raise RuntimeError("operation not permitted\nwhile capturing")

    monkeypatch.setattr(module.SegmentedGraph, "capture", refuse)
    path = make_checkpoint(tmp_path, tokenizer=False)
    with caplog.at_level("WARNING", "phalanx"):
        (graphs,) = threads.run(lambda comm: Rank(comm, path).graphs, 1)
    assert graphs.most == 0 and not graphs.supports(ScheduledBatch(*[np.array([1])] * 5))
    assert "kernel by kernel" in caplog.text and "128 tokens: operation" in caplog.text


class Ranks:
    """A group whose other rank says this, of seconds and of the lack of room."""

    def __init__(self, other):
        self.other = other

    def all_gather(self, x):
        return torch.stack((x, x if x.numel() == 1 else torch.tensor(self.other, device=x.device)))


PEAK = 1 << 30  # bytes of the largest step


@pytest.mark.parametrize(
    "launched, room, other, pays",
    [
        (0.7, 1 << 40, (0.1, 1.0, -1.0), True),
        (0.5, 1 << 40, (0.5, 1.0, -1.0), False),
        (0.5, 1 << 40, (0.7, 1.0, -1.0), True),  # it waits for the other rank's host
        (0.7, 1 << 40, (0.1, 2.0, -1.0), False),
        (1.0, PEAK + (4 << 20), (0.1, 1.0, -1.0), True),
        (1.0, PEAK + (3 << 20), (0.1, 1.0, -1.0), False),  # the largest step would not fit
        (1.0, 1 << 40, (0.1, 1.0, 0.0), False),
    ],
)
def test_when_graphs_pay(monkeypatch, launched, room, other, pays):
    """Steps are captured where launching takes much of their time on the slowest rank, and all have memory."""
    for name, made in dict(
        reset_peak_memory_stats=None, synchronize=None, empty_cache=None, memory_allocated=0,
        max_memory_allocated=1 << 20, mem_get_info=(room, room), current_device="cpu",
    ).items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, made=made: made)
    clock = iter([0.0, 1.0, 2.0, 2.0, 2.0 + launched, 3.0, 5.0, 6.0, 7.0])  # the second run is the shortest
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    graphs = module.PiecewiseGraphs.__new__(module.PiecewiseGraphs)
    graphs._run, graphs._peak = lambda size: None, PEAK
    assert graphs._pays(16, Ranks(other)) == pays


def test_what_is_borrowed_goes_with_who_borrowed_it(monkeypatch):
    """A model that is unloaded leaves nothing behind, though a tensor keeps what it was made of."""
    kept = []
    x = torch.arange(8.0).bfloat16().view(2, 4)[:, 1:]
    monkeypatch.setattr(segmented_graph, "capturing", lambda: "some")
    monkeypatch.setattr(torch, "as_tensor", lambda of, device: kept.append(of) or x.view(torch.int16))
    borrowed = Borrowed(x)
    gone = weakref.ref(borrowed)
    assert torch.equal(borrowed.tensor, x) and borrowed.tensor is borrowed.tensor
    (of,) = kept
    assert of.__cuda_array_interface__ == dict(
        shape=(2, 3), typestr="<i2", data=(x.data_ptr(), False), version=2, strides=(8, 2)
    )
    del borrowed
    assert gone() is None


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_function_between_segments_reads_what_is_not_kept():
    """Rows that are apart, of a tensor whose memory later segments get."""
    x = torch.arange(48, device="cuda").view(4, 12).bfloat16()
    seen = []

    def work():
        y = (x + 1)[:, 2:6]
        given = Borrowed(y)
        on_host(lambda tokens: seen.append(given.tensor[:tokens].clone()), 4)
        del y
        return x * 2

    segmented = SegmentedGraph(torch.cuda.graph_pool_handle())
    with torch.cuda.stream(torch.cuda.Stream()):
        work()
        torch.cuda.synchronize()
        segmented.capture(work)
        seen.clear()
        for tokens in (4, 3):
            segmented.replay(tokens)
        torch.cuda.synchronize()
    assert [one.tolist() for one in seen] == [(x + 1)[:tokens, 2:6].tolist() for tokens in (4, 3)]
