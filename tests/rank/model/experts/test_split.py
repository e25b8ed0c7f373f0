"""The GPU's part of experts that it computes with the CPU: what lies in host memory for it, and when it is made."""

from types import SimpleNamespace

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels import host_memory
from phalanx.kernels.cpp import ops
from phalanx.kernels.moe import host_exchange
from phalanx.kernels.moe.host_choice import Costs
from phalanx.kernels.moe.moe import matrix
from phalanx.kernels.quantized import gpu_form, pieces_cuda
from phalanx.rank.model.experts import few_tokens, split
from phalanx.rank.model.experts.few_tokens import FewTokens
from phalanx.rank.model.experts.fused import FusedExperts
from phalanx.rank.model.experts.offload import ExpertRoom
from phalanx.rank.model.load import load

from ..shapes import MODELS
from ..test_architectures import write

pytestmark = pytest.mark.skipif(not ops.available(), reason="no C++ operations")
INNER, EXPERTS = 768, 10
COSTS = Costs((33e-6,) * 4, 69e-6)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    sizes = {"moe_intermediate_size": INNER, "hidden_size": 256, "intermediate_size": 256, "head_dim": 128}
    return write(tmp_path_factory.mktemp("split"), **MODELS["qwen3_moe"] | sizes)


@pytest.fixture
def played(monkeypatch):
    """A GPU whose memory is the host's."""
    monkeypatch.setattr(host_memory, "pin_memory", lambda memory: None)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: True)
    monkeypatch.setattr(host_memory, "on_gpu", lambda memory: memory)
    monkeypatch.setattr(host_exchange, "supports", lambda device: True)
    monkeypatch.setattr(split, "Beside", lambda device: SimpleNamespace())
    monkeypatch.setattr(few_tokens, "DEARER", 1e9)


def hosts(path, **options):
    def rank(world):
        model = load(path, mesh.build(world, 1, 1), "cpu", "f32", experts=ExpertRoom(3), **options)
        return [one.host for one in model.modules() if isinstance(one, FusedExperts)]

    return threads.run(rank, 1)[0]


def attach(layers, dtype=torch.bfloat16, room=None, costs=COSTS):
    return split.attach(layers, {one.layer.form: costs for one in layers}, dtype, room)


@pytest.mark.parametrize("at_once", [1, 3, EXPERTS])
@pytest.mark.parametrize("isq", ["q4k", "q6k", "q8_0", "fp8"])
def test_the_last_units_of_all_experts(path, played, monkeypatch, isq, at_once):
    layers = hosts(path, isq=isq)
    monkeypatch.setattr(gpu_form, "CHUNK", at_once * layers[0].layer.here.nbytes(1))
    units = 512 if isq == "fp8" else 576
    assert f"{INNER - units} of {INNER} units" in attach(layers)
    for layer in layers:
        part = layer.few.share
        assert part.units == units and part.stack.size == EXPERTS
        for mine, whole, axis in zip(part.stack, layer.layer.stack, (0, 1), strict=True):
            assert isinstance(mine.packed, pieces_cuda.Packed) and mine.packed.pieces.data_ptr() % 256 == 0
            for expert in range(EXPERTS):
                all_of = matrix(whole, expert, torch.float32)
                halves = all_of.chunk(2) if axis == 0 else [all_of]
                want = torch.cat([one.narrow(axis, units, INNER - units) for one in halves])
                assert torch.equal(matrix(mine, expert, torch.float32), want)


def test_where_the_cpu_computes_whole_experts(path, played, monkeypatch):
    layers = hosts(path, isq="q4k")
    for of in (dict(dtype=torch.float32), dict(costs=Costs((1e-6,) * 4, 58e-6)), dict(room=1 << 20)):
        assert attach(layers, **of) == "" and all(one.few.share is None for one in layers)
    monkeypatch.setattr(host_exchange, "supports", lambda device: False)
    assert attach(layers) == ""
    monkeypatch.setattr(host_exchange, "supports", lambda device: True)
    with monkeypatch.context() as patch:
        patch.setattr(FewTokens, "serves_alone", lambda few, dtype: False)
        assert attach(layers) == ""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: False)
    said = "the GPU computes no part of the experts that the CPU serves: 0.9 MB of host memory could not be pinned"
    assert attach(layers) == said and all(one.few.share is None for one in layers)


class Stream:
    """Says what is launched, and waited for."""

    now = None

    def __init__(self, name, done):
        self.name, self.done = name, done

    def wait_stream(self, other):
        self.done.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.done.append(f"{self.name} waits for the end of {event}")

    def record_event(self):
        return self.name

    def __enter__(self):
        self.before, Stream.now = Stream.now, self

    def __exit__(self, *_):
        Stream.now = self.before


def test_the_other_stream_begins_and_is_joined(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", done))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.now)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: one)
    beside, x = split.Beside(torch.device("cuda")), torch.ones(2)
    with Stream("step", done):
        part = beside.run(lambda x: done.append(Stream.now.name) or 2 * x, x)
        assert done == ["side waits for step", "side"] and part.read == (x,)
        assert torch.equal(part.joined(), 2 * x) and done[2:] == ["step waits for the end of side"]
