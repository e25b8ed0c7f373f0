"""Which batches are captured, and which GEMMs the library's algorithms are chosen for."""

import logging
from types import SimpleNamespace

import pytest
import torch
from phalanx.comm import custom_allreduce, mesh, threads
from phalanx.comm.watchdog import LocalWatchdog
from phalanx.kernels.device import DeviceCaps
from phalanx.kernels.quantized import cuda_layouts, e4m3_wgmma
from phalanx.rank.model.architectures import llama
from phalanx.rank.worker import graphs, model_runner
from phalanx.rank.worker.graphs import capture_sizes, gemms

HIDDEN, INNER, VOCABULARY = 32, 48, 100
GPU = torch.device("cuda")


def model(tp=1, pp=1, **more):
    """The model on each rank, without memory."""
    args = llama.Args(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=VOCABULARY, rope_parameters={"rope_theta": 1e4, "rope_type": "default"}, **more,
    )  # fmt: skip
    return threads.run(lambda comm: llama.Model(args, mesh.build(comm, tp, pp), 64), tp * pp)


def test_captured_sizes():
    assert capture_sizes(3) == [1, 2, 3] and capture_sizes(100) == [1, 2, 4, *range(8, 65, 8), 80, 96, 100]
    assert capture_sizes(2000)[-3:] == [480, 496, 512]
    assert capture_sizes(256, 256 // 4) == [1, 2, 4, *range(8, 65, 8)] and capture_sizes(4, 64 // 8) == [1, 2, 4]
    assert capture_sizes(100, 0) == [1]


def found(one, max_num_seqs):
    return [(tuple(gemm.weight.shape), gemm.counts) for gemm in gemms(one, max_num_seqs) if not gemm.peers]


QKV, OUT, GATE_UP, DOWN = (64, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)


@pytest.mark.parametrize("max_num_seqs, captured", [(100, [80, 96, 100]), (64, []), (65, [65]), (8, [])])
def test_gemms_of_a_model(max_num_seqs, captured):
    """The embedding's table is no GEMM's."""
    (one,) = model()
    layer = [(shape, captured) for shape in (QKV, OUT, GATE_UP, DOWN)]
    assert found(one, max_num_seqs) == [*layer, *layer, ((VOCABULARY, HIDDEN), captured)]


def test_products_of_tied_split_and_biased_models():
    (one,) = model(tie_word_embeddings=True)
    assert [shape for shape, _ in found(one, 80)][-2:] == [DOWN, (VOCABULARY, HIDDEN)]
    (one,) = model(attention_bias=True)
    biased = [(tuple(gemm.weight.shape), gemm.bias) for gemm in gemms(one, 80)]
    layer = [(QKV, True), (OUT, True), (GATE_UP, False), (DOWN, False)]
    assert biased == [*layer, *layer, ((VOCABULARY, HIDDEN), False)]
    ranks = model(pp=2)
    shapes = sorted([shape for shape, _ in found(one, 80)] for one in ranks)
    assert shapes == [[QKV, OUT, GATE_UP, DOWN], [QKV, OUT, GATE_UP, DOWN, (VOCABULARY, HIDDEN)]]
    one, _ = model(tp=2)
    assert [shape for shape, _ in found(one, 80)][:4] == [(32, HIDDEN), (HIDDEN, 16), (INNER, HIDDEN), (HIDDEN, 24)]


def test_what_is_compiled_ahead(monkeypatch):
    """For the captured sizes that are few rows, once for each module."""
    asked = []
    monkeypatch.setattr(graphs, "device_caps", lambda device: "device caps")
    monkeypatch.setattr(graphs.linear, "variants", lambda *a: asked.append(a) or ["a program"])
    (one,) = model()
    assert list(graphs.gemm_variants(one, 100, 8192, GPU)) == ["a program"] * 9
    rows = [1, 2, 4, *range(8, 65, 8)]

    def said(shape):
        return rows, shape, "silu" if shape == GATE_UP else "", False, "device caps"

    found = [(a[0], tuple(a[1].shape), *a[2:]) for a in asked]
    layer = [said(shape) for shape in (QKV, OUT, GATE_UP, DOWN)]
    assert found == [*layer, *layer, said((VOCABULARY, HIDDEN))]


class QuantizedPart:
    """A linear of which e4m3_wgmma.py's config of so many rows is all that is compiled."""

    outputs, inputs, alike, added_bias, packed = 28672, 4096, 1, None, None

    def config(self, rows, gate, found):
        layout = cuda_layouts.wide(128 * self.alike)
        return e4m3_wgmma.choose(rows, self.outputs, self.inputs, layout, bool(gate), found.num_sms)

    def variants(self, rows, gate, dtype, found):
        return (self.config(n, gate, found) for n in rows)


@pytest.mark.sample(5)
@pytest.mark.parametrize("num_sms", [78, 114, 132])
@pytest.mark.parametrize("alike", [1, 4])
@pytest.mark.parametrize("outputs, inputs, gate", [(6144, 4096, ""), (28672, 4096, "silu"), (4096, 14336, "")])
def test_prompts_of_any_length_find_their_kernels(outputs, inputs, gate, alike, num_sms, monkeypatch):
    """Caps for quantised weights: of an H20, an H100 on PCIe, an H200."""
    hopper = DeviceCaps(num_sms, "sm_90a", has_pdl=True, has_tma=True, hopper=True)
    part = QuantizedPart()
    part.outputs, part.inputs, part.alike = outputs, inputs, alike
    one = SimpleNamespace(matrix=None, parts=[part], activation=gate)
    monkeypatch.setattr(graphs, "device_caps", lambda device: hopper)
    monkeypatch.setattr(graphs, "_linears", lambda model: [one])
    asked = SimpleNamespace(tensor=SimpleNamespace(size=1), dtype=torch.bfloat16)
    ahead = set(graphs.gemm_variants(asked, 8, 8192, GPU))
    rows = range(e4m3_wgmma.LEAST_ROWS, 8193, 5)
    late = [n for n in rows if part.config(n, gate, hopper) not in ahead]
    assert len(late) <= 0.01 * len(rows)
    if gate:  # gated together, once all parts are there
        one.parts = [part, part]
        assert set(graphs.gemm_variants(asked, 8, 100, GPU)) == {
            part.config(n, "", hopper) for n in [*graphs.capture_sizes(8), *graphs.eager_sizes(100)]
        }


def test_sizes_of_steps_with_prompts():
    assert graphs.eager_sizes(5) == [1, 2, 3, 4, 5] and graphs.eager_sizes(50) == [*range(1, 9), 16, 33, 48, 50]
    assert graphs.eager_sizes(1200)[-4:] == [1024, 1088, 1152, 1200]
    assert graphs.eager_sizes(4096)[-4:] == [2560, 3072, 3584, 4096]


def test_layers_that_are_alike_are_asked_once(monkeypatch):
    asked = []

    class Counted(QuantizedPart):
        def __init__(self, outputs, bias=None):
            self.packed, self.added_bias = (torch.empty(outputs, 4), outputs, "layout"), bias

        def variants(self, rows, gate, dtype, found):
            asked.append((self.packed[1], gate, self.added_bias is not None))
            return ()

    def linear(outputs, gate="", bias=None):
        return SimpleNamespace(matrix=None, parts=[Counted(outputs, bias)], activation=gate)

    linears = [linear(64), linear(64), linear(128), linear(64, "silu"), linear(64, bias=torch.zeros(64)), linear(128)]
    monkeypatch.setattr(graphs, "device_caps", lambda device: None)
    monkeypatch.setattr(graphs, "_linears", lambda model: linears)
    model = SimpleNamespace(tensor=SimpleNamespace(size=1), dtype=torch.bfloat16)
    assert list(graphs.gemm_variants(model, 8, 100, GPU)) == []
    each = [(64, "", False), (128, "", False), (64, "silu", False), (64, "", True)]
    assert asked == [*each, *each]  # for captured sizes, and for prompts


class Group(custom_allreduce.CustomAllReduceComm):
    """A group of GPUs that reach each other's memory, without any GPU."""

    size = 4

    def __init__(self, peers=None, done=None):
        self.peers, self.done = peers, done

    def agree(self):
        self.done.append("agreed")


def test_products_that_a_group_may_spread():
    """Row-parallel linears on all ranks, of which one adds a bias."""
    peers = object()
    (one,) = model()
    one.tensor = Group(peers)
    wanted = [(tuple(one.weight.shape), one.counts) for one in gemms(one, 100) if one.peers is peers]
    assert wanted == [(OUT, [80, 96, 100]), (DOWN, [80, 96, 100])] * 2
    ranks = model(tp=2, mlp_bias=True)
    out, down, biases = (HIDDEN, HIDDEN // 2), (HIDDEN, INNER // 2), []
    for one in ranks:
        one.tensor = Group(peers)
        spread = [gemm for gemm in gemms(one, 80) if gemm.peers]
        assert [tuple(gemm.weight.shape) for gemm in spread] == [out, down] * 2
        biases.append([gemm.bias for gemm in spread])
    assert sorted(biases) == [[False] * 4, [False, True] * 2]


@pytest.mark.parametrize("rank, stages", [(0, 1), (1, 1), (0, 2)])
def test_algorithms_are_chosen_before_graphs_are_captured(rank, stages, monkeypatch, caplog):
    """With pipeline stages too, which have none; rank 0 speaks for all."""
    done = []
    for name in ("set_device", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: None)
    monkeypatch.setattr(model_runner.autotune, "tune", lambda gemms: done.extend(gemms) or "2 of 16 are others")
    graphs = SimpleNamespace(capture=lambda reached: done.append("captured"), sizes=[1, 2])
    piecewise, pieces = SimpleNamespace(capture=lambda group, reached: done.append("in pieces"), most=1024), []
    monkeypatch.setattr(model_runner, "DecodeGraphs", lambda *_: graphs)
    monkeypatch.setattr(model_runner, "PiecewiseGraphs", lambda *of: pieces.append(of[-2:]) or piecewise)
    one = model_runner.ModelRunner.__new__(model_runner.ModelRunner)
    one.model = model()[0]
    one.mesh = SimpleNamespace(stages=stages, world=SimpleNamespace(rank=rank), tensor=Group(done=done))
    one.state, one.device, one.watch = SimpleNamespace(length=[0] * 80), None, LocalWatchdog()
    one._last = one.caches = one._upload = None
    one._drafting = None
    one._limits = model_runner.StepLimits(2048, 8192, 1 << 30)
    one._snapshots = SimpleNamespace(compile=lambda: done.append("compiled"))
    with caplog.at_level(logging.INFO, "phalanx"):
        one._enter_device()
    assert done[0] == "compiled" and [one.counts for one in done[1:10]] == [[80]] * 9
    assert done[10:] == ["agreed"] + ["captured", "in pieces"] * (stages == 1)
    assert pieces == [(4095, 1 << 30)] * (stages == 1)  # longer ones are cut into microbatches
    said = "captured CUDA graphs of 2 batch sizes and of steps with prompts of up to 1024 tokens in"
    assert any(one.startswith(said) for one in caplog.messages) == (rank == 0 and stages == 1)
    assert ("2 of 16 are others" in caplog.messages) is (rank == 0)
