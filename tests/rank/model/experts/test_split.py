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


def written(folder, inner):
    sizes = {"moe_intermediate_size": inner, "hidden_size": 256, "intermediate_size": 256, "head_dim": 128}
    return write(folder, **MODELS["qwen3_moe"] | sizes)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return written(tmp_path_factory.mktemp("split"), INNER)


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


def attach(layers, dtype=torch.bfloat16, room=None, costs=(COSTS,)):
    """costs: of each layer, or of all."""
    for one, its in zip(layers, costs * (len(layers) // len(costs)), strict=True):
        one._choice.costs = its
    return split.attach(layers, dtype, room)


def units_of(layers):
    return [one.few.share and one.few.share.units for one in layers]


@pytest.mark.parametrize("at_once", [1, 3, EXPERTS])
@pytest.mark.parametrize("isq", ["q4k", "q6k", "q8_0", "fp8"])
def test_the_last_units_of_all_experts(path, played, monkeypatch, isq, at_once):
    layers = hosts(path, isq=isq)
    monkeypatch.setattr(gpu_form, "CHUNK", at_once * layers[0].layer.here.nbytes(1))
    units = 512 if isq == "fp8" else 576
    assert f"in 2 of 2 layers the GPU computes {INNER - units} of {INNER} units" in attach(layers)
    assert units_of(layers) == [units] * 2
    for layer in layers:
        part = layer.few.share
        assert part.stack.size == EXPERTS
        for mine, whole, axis in zip(part.stack, layer.layer.stack, (0, 1), strict=True):
            assert isinstance(mine.packed, pieces_cuda.Packed) and mine.packed.pieces.data_ptr() % 256 == 0
            for expert in range(EXPERTS):
                all_of = matrix(whole, expert, torch.float32)
                halves = all_of.chunk(2) if axis == 0 else [all_of]
                want = torch.cat([one.narrow(axis, units, INNER - units) for one in halves])
                assert torch.equal(matrix(mine, expert, torch.float32), want)


def test_where_the_cpu_computes_whole_experts(path, played, monkeypatch):
    layers = hosts(path, isq="q4k")
    for of in (dict(dtype=torch.float32), dict(costs=(Costs((1e-6,) * 4, 58e-6),))):
        assert attach(layers, **of) == "" and units_of(layers) == [None, None]
    monkeypatch.setattr(host_exchange, "supports", lambda device: False)
    assert attach(layers) == ""
    monkeypatch.setattr(host_exchange, "supports", lambda device: True)
    with monkeypatch.context() as patch:
        patch.setattr(FewTokens, "serves_alone", lambda few, dtype: False)
        assert attach(layers) == ""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: False)
    said = "the GPU computes no part of the experts that the CPU serves: 0.9 MB of host memory could not be pinned"
    assert attach(layers) == said and units_of(layers) == [None, None]


def with_cpu(seconds):
    return COSTS._replace(cpu=(seconds,) * 4)


@pytest.mark.parametrize("first, units", [(17e-6, 640), (8e-6, None)])
def test_one_choice_for_layers_of_two_forms(path, played, first, units):
    """Alone the first layer would have 640 units or all of them on the CPU, and the second one 448."""
    layers = hosts(path, isq="q4km")
    assert layers[0].layer.form != layers[1].layer.form
    said = attach(layers, costs=(with_cpu(first), with_cpu(66e-6)))
    assert units_of(layers) == [units] * 2 and ("in 2 of 2 layers" in said) == bool(units)


def test_what_forms_leave_together(path, played):
    both = [hosts(path, isq=isq)[0] for isq in ("q4k", "fp8")]
    assert "in 2 of 2 layers" in attach(both) and units_of(both) == [512] * 2


def test_layers_that_are_left_out(path, played, monkeypatch, tmp_path):
    """One that the CPU does not serve alone, one that no kernel reads a part of, and one of another size."""
    layers = hosts(path, isq="q4k")
    layers += [hosts(path)[0], *hosts(path, isq="q4k"), hosts(written(tmp_path, 512), isq="q4k")[0]]
    monkeypatch.setattr(layers[0].few, "serves_alone", lambda dtype: False)
    assert "in 3 of 6 layers" in attach(layers)
    assert units_of(layers) == [None, 576, None, 576, 576, None]


def test_no_more_than_half_of_what_the_host_has_left(path, played, monkeypatch):
    """What is pinned is what was reckoned with."""
    sizes = []
    monkeypatch.setattr(host_memory, "pin_memory", lambda memory: sizes.append(memory.nbytes))
    layers = hosts(path, isq="q4km")
    assert attach(layers, room=1 << 40) and len(sizes) == 2
    room = int(sum(sizes) / split.HOST_SHARE)
    assert "more of it" in attach(layers, room=room) and len(sizes) == 4
    layers = hosts(path, isq="q4km")
    said = attach(layers, room=room - 1)
    assert said.startswith("the GPU computes no part") and "more than 50% of the 0.00 GB" in said
    assert len(sizes) == 4 and units_of(layers) == [None, None]


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
